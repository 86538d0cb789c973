"""Every installed schedule conforms, whoever wrote it."""

from importlib.metadata import EntryPoint, entry_points

import pluggy
import pytest

from megatron_run import hookspecs
from megatron_run.contracts import Schedule, entry_point_group
from megatron_run.testing.check import Check
from megatron_run.testing.schedule import schedule_checks

INSTALLED = sorted(entry_points(group=entry_point_group("schedule")), key=lambda entry: entry.name)


def make(entry: EntryPoint) -> Schedule:
    """The plugin's object with its default options."""
    hooks = pluggy.PluginManager("megatron_run")
    hooks.add_hookspecs(hookspecs)
    hooks.register(entry.load(), name=f"schedule={entry.name}")
    info = hooks.hook.megatron_run_plugin_info()
    assert (info.kind, info.name) == ("schedule", entry.name)
    schedule = hooks.hook.megatron_run_create_schedule(options=info.options() if info.options else None)
    assert isinstance(schedule, Schedule)
    return schedule


CASES = [(entry, check) for entry in INSTALLED for check in schedule_checks(make(entry))]


@pytest.mark.parametrize("check", [pytest.param(check, id=f"{entry.name}: {check.name}") for entry, check in CASES])
def test_an_installed_schedule_conforms(check: Check) -> None:
    check.run()


def test_the_first_party_schedules_are_installed() -> None:
    assert {"sequential", "1f1b", "interleaved"} <= {entry.name for entry in INSTALLED}
