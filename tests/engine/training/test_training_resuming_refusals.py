"""Whether a run may resume from a checkpoint: plugins, versions of their state, and the errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from megatron_run.contracts import PluginInfo
from megatron_run.errors import CheckpointError
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_engine.checkpoint.manifest import About, PluginRecord
from megatron_run_engine.training.state.resuming import optimizer_upgrade, plugin_changes, plugin_records, scaler_state
from tests.support.saved_steps import about

Upgrade = Callable[[Mapping[str, Any], int], Mapping[str, Any]]


def plugin(kind: str, name: str, state_version: int = 1, upgrade: Upgrade | None = None) -> Plugin:
    info = PluginInfo(kind, name, state_version=state_version, upgrade_state=upgrade)
    return Plugin(kind, name, f"acme-{name}", "0.3.0", "test", info, "", "", lambda: None)


def saved(kind: str, name: str, state_version: int = 1, **more: Any) -> About:
    record = PluginRecord(name=name, distribution=f"acme-{name}", version="0.2.0", state_version=state_version)
    return about(7, plugins={kind: (record,)}, **more)


def test_the_lock_says_who_saved() -> None:
    (record,) = plugin_records({"scaler": [plugin("scaler", "wild", 3)]})["scaler"]
    assert record.model_dump() == {
        "name": "wild",
        "distribution": "acme-wild",
        "version": "0.3.0",
        "state_version": 3,
    }
    assert record.source == "acme-wild==0.3.0"


def test_changed_plugins_are_listed() -> None:
    before, now = saved("schedule", "gpipe"), {"schedule": [plugin("schedule", "1f1b")]}
    assert plugin_changes(before, now) == ["step 7 was saved with schedule=gpipe, resuming with schedule=1f1b"]
    assert not plugin_changes(saved("schedule", "1f1b"), now)


def test_the_same_scaler_loads_what_it_saved() -> None:
    assert scaler_state(saved("scaler", "wild"), {"scaler": [plugin("scaler", "wild")]}, ()) == about(7).scaler


def test_a_newer_scaler_upgrades_older_state() -> None:
    def upgrade(state: Mapping[str, Any], version: int) -> Mapping[str, Any]:
        return {**state, "from": version}

    now = {"scaler": [plugin("scaler", "wild", 3, upgrade)]}
    assert scaler_state(saved("scaler", "wild", 2), now, ()) == {**about(7).scaler, "from": 2}


@pytest.mark.parametrize(("before", "now", "upgrade"), [(1, 2, None), (3, 2, None), (3, 2, lambda state, _: state)])
def test_state_of_another_version_names_what_to_install(before: int, now: int, upgrade: Upgrade | None) -> None:
    """What a newer version wrote, an older one cannot upgrade."""
    with pytest.raises(CheckpointError) as error:
        scaler_state(saved("scaler", "wild", before), {"scaler": [plugin("scaler", "wild", now, upgrade)]}, ())
    assert str(error.value) == (
        f"step 7 holds state of version {before} of scaler=wild: acme-wild 0.3.0 writes and reads version {now}; "
        "install acme-wild==0.2.0"
    )


def test_another_scaler_starts_anew_only_where_that_is_allowed() -> None:
    before, now = saved("scaler", "wild"), {"scaler": [plugin("scaler", "tame")]}
    with pytest.raises(CheckpointError, match=r"was written by acme-wild==0\.2\.0; choose scaler=wild"):
        scaler_state(before, now, ("optimizer",))
    assert scaler_state(before, now, ("scaler",)) is None
    assert scaler_state(saved("scaler", "wild", scaler={}), now, ()) is None, "there was no state to lose"


def test_an_upgrade_that_fails_names_the_plugin_and_what_to_install() -> None:
    now = {"scaler": [plugin("scaler", "wild", 3, lambda state, version: {"scale": state["missing"]})]}
    with pytest.raises(CheckpointError) as error:
        scaler_state(saved("scaler", "wild", 2), now, ())
    assert str(error.value) == (
        "scaler=wild of acme-wild 0.3.0 cannot read the state of version 2 in step 7: its upgrade_state raised "
        "KeyError: 'missing'; install acme-wild==0.2.0"
    )


def test_an_optimizer_whose_fields_changed_their_meaning_is_refused_and_another_optimizer_is_not() -> None:
    now = {"optimizer": [plugin("optimizer", "flat", 2)]}
    with pytest.raises(CheckpointError, match="state of version 1 of optimizer=flat"):
        optimizer_upgrade(saved("optimizer", "flat", 1), now)
    assert optimizer_upgrade(saved("optimizer", "flat", 2), now) is None
    assert optimizer_upgrade(saved("optimizer", "other", 1), now) is None


def test_a_newer_optimizer_upgrades_older_fields() -> None:
    def upgrade(state: Mapping[str, Any], version: int) -> Mapping[str, Any]:
        return {"momentum": state["velocity"] * version}

    found = optimizer_upgrade(saved("optimizer", "flat", 3), {"optimizer": [plugin("optimizer", "flat", 4, upgrade)]})
    assert found is not None
    assert found({"velocity": 5}) == {"momentum": 15}
