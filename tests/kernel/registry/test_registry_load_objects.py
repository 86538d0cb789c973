from __future__ import annotations

import types
from collections.abc import Sequence

import pytest

from megatron_run.contracts import Observer, PluginInfo, Schedule
from megatron_run.contracts.schedule import Action, ScheduleSpec
from megatron_run.errors import ExitCode, PluginError
from megatron_run.registry.load import from_object
from tests.support.fake_plugins import schedule_source


class ZigZag(Schedule):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        return [[Action(op, m, 0) for m in range(spec.microbatches) for op in ("F", "B")]]


class Named(ZigZag):
    info = PluginInfo("schedule", "better", provides=frozenset({"parallel.pipeline"}))


class Misnamed(ZigZag):
    info = PluginInfo("model", "better")


class Watcher(Observer):
    pass


def test_a_schedule_is_a_plugin_named_after_its_class() -> None:
    schedule = ZigZag()
    plugin = from_object(schedule)
    assert (str(plugin), plugin.origin, plugin.distribution, plugin.location) == (
        "schedule=zigzag",
        "python",
        "",
        __file__,
    )
    assert plugin.info.provides == {"parallel.pipeline", "parallel.chunks"}
    assert plugin.create() is schedule
    assert len(plugin.digest) == 64


def test_other_kinds_are_told_by_their_contract() -> None:
    watcher = Watcher()
    plugin = from_object(watcher)
    assert plugin.kind == "observer"
    assert not plugin.info.provides
    assert plugin.create() is watcher


def test_an_object_may_describe_itself() -> None:
    plugin = from_object(Named())
    assert plugin.name == "better"
    assert plugin.info.provides == {"parallel.pipeline"}


def test_a_module_with_hooks_is_a_plugin() -> None:
    module = types.ModuleType("acme.mine")
    exec(schedule_source(), module.__dict__)
    plugin = from_object(module)
    assert str(plugin) == "schedule=mine"
    assert isinstance(plugin.create(), Schedule)


@pytest.mark.parametrize(
    ("candidate", "what", "rest"),
    [
        (ZigZag, "ZigZag is a class", "; hand in an object: ZigZag()"),
        (
            Misnamed(),
            "the plugin object Misnamed breaks its contract",
            ": info says model=better, and it was chosen as schedule=better",
        ),
        (
            3,
            "3 is no plugin: it has no factory hook",
            "; implement megatron_run_plugin_info and the megatron_run_create_... hook of one kind",
        ),
    ],
)
def test_anything_else_is_refused(candidate: object, what: str, rest: str) -> None:
    with pytest.raises(PluginError) as caught:
        from_object(candidate)
    assert caught.value.exit_code == ExitCode.PLUGIN
    assert str(caught.value) == what + rest
