"""State of an older version of an optimizer is read as the version of now would have saved it, box by box."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_run.contracts import PluginInfo
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.boxes import Box
from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.training.state.reading import UpgradingReader
from tests.support.resuming import SMALL, attempt
from tests.support.saved_steps import State, cut, save_alone

STATE: State = {
    "w": {"master": torch.rand(6, 4), "velocity": torch.rand(6, 4), "count": torch.tensor(7)},
    "b": {"master": torch.rand(5), "velocity": torch.rand(5), "count": torch.tensor(7)},
}


def renamed(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A version in which a moment has another name and sign, a counter another type, and a field is new."""
    assert state["master"].shape == state["velocity"].shape
    return {
        "master": state["master"],
        "exp_avg": -state["velocity"],
        "step": state["count"].float(),
        "norm": state["master"] * state["count"],
    }


@pytest.fixture
def reader(tmp_path: Path) -> UpgradingReader:
    checkpoints = save_alone(tmp_path / "c", 1, STATE)
    return UpgradingReader(Reader(checkpoints.folder(1), checkpoints.manifest(1)), renamed)


def test_any_box_of_an_upgraded_field_is_that_of_the_whole_upgraded_tensor(reader: UpgradingReader) -> None:
    for name, fields in STATE.items():
        whole = renamed(fields)
        assert reader.fields(name) == set(whole)
        assert torch.equal(reader.read(name, "step", (), ()), torch.tensor(7.0))
        for field in ("master", "exp_avg", "norm"):
            shape = tuple(whole[field].shape)
            for box in cut(random.Random(3), Box((0,) * len(shape), shape), 5):
                expected = whole[field][box.within(Box((0,) * len(shape), shape))]
                assert torch.equal(reader.read(name, field, *box), expected), (name, field, box)


def test_an_unknown_tensor_has_no_fields_and_is_named(reader: UpgradingReader) -> None:
    assert reader.fields("ww") == frozenset()
    with pytest.raises(CheckpointError, match="did you mean 'w'"):
        reader.read("ww", "master", (0,), (1,))


def test_an_upgrade_to_another_shape_is_refused(reader: UpgradingReader) -> None:
    with pytest.raises(CheckpointError, match=r"upgraded step of w .* has the shape \[\], the optimizer wants \[3\]"):
        reader.read("w", "step", (0,), (3,))


def test_a_run_goes_on_from_what_older_versions_of_its_optimizer_and_scaler_saved(tmp_path: Path) -> None:
    """The older versions are those of now under other names: upgraded, the run is the one that never stopped."""
    from megatron_run_engine.builtin.optimizer import adamw
    from megatron_run_engine.optim import update
    from megatron_run_scaler_dynamic import DynamicScaler

    sets = {**SMALL, "train.steps": 4, "train.precision": "fp16", "checkpoint.interval": 2}
    whole = attempt(tmp_path / "whole", sets)
    by_value, state_dict = update._by_value, DynamicScaler.state_dict
    del adamw

    def old_fields(*arguments: Any) -> dict[str, Tensor]:
        fields = by_value(*arguments)
        return {"velocity" if field == "exp_avg" else field: value for field, value in fields.items()}

    def old_state(scaler: DynamicScaler) -> dict[str, Any]:
        return {f"old_{name}": value for name, value in state_dict(scaler).items()}

    with (
        mock.patch.object(update, "_by_value", old_fields),
        mock.patch.object(DynamicScaler, "state_dict", old_state),
    ):
        attempt(tmp_path / "run", sets, stop_after=2)

    with versions_of_now(), pytest.raises(CheckpointError, match="holds state of version 1 of"):
        attempt(tmp_path / "run", sets)

    def new_fields(state: Mapping[str, Any], version: int) -> Mapping[str, Any]:
        assert version == 1
        return {"exp_avg" if field == "velocity" else field: value for field, value in state.items()}

    def new_state(state: Mapping[str, Any], version: int) -> Mapping[str, Any]:
        assert version == 1
        return {name.removeprefix("old_"): value for name, value in state.items()}

    with versions_of_now(optimizer=new_fields, scaler=new_state):
        resumed = attempt(tmp_path / "run", sets)
    assert resumed.numbers == {step: whole.numbers[step] for step in (3, 4)}
    assert Checkpoints(tmp_path / "run" / "checkpoints").manifest(4).about.plugins["optimizer"][0].state_version == 2


def versions_of_now(**upgrades: Any) -> Any:
    """A patch: optimizers and scalers say that their state has version 2, and upgrade older ones by these functions."""
    from dataclasses import replace

    from megatron_run.planning import resolver

    resolve = resolver.resolve

    def newer(request: Any) -> Any:
        run = resolve(request)
        plugins = dict(run.plugins)
        for kind in ("optimizer", "scaler"):
            (plugin,) = plugins[kind]
            info: PluginInfo = replace(plugin.info, state_version=2, upgrade_state=upgrades.get(kind))
            plugins[kind] = (replace(plugin, info=info),)
        return replace(run, plugins=plugins)

    return mock.patch("megatron_run.planning.resolve", newer)
