"""What a plugin does against its contract ends a run in one line that names the plugin, as its suite would say."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_run.contracts import DataSource, Field, Scaler
from megatron_run.contracts.data import DOCUMENTS, POSITIONS
from megatron_run.errors import DataError, ExitCode, PluginError
from megatron_run.registry.load import from_object
from megatron_run_engine.training.checked_plugins import CheckedScaler, open_split
from tests.support.broken import BROKEN_IN_A_RUN, write_broken_in_a_run
from tests.support.forked import run_forked, tiny


@pytest.mark.parametrize("name", ["outside", "no_layer", "no_base", "stateless"])
def test_a_run_with_a_broken_plugin_ends_in_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    word, code = write_broken_in_a_run(tmp_path)[name]
    ran = run_forked(tiny(tmp_path / "run", plugins=[word], nproc=1))
    kind = BROKEN_IN_A_RUN[name][0]
    assert ran.code == code, ran.message
    assert "\n" not in ran.message
    assert f"{kind}=" in ran.message
    assert name in ran.message


LEAVES = """
import os
import sys

import torch


class Leaves(torch.optim.SGD):
    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 2 and os.environ.get("RANK") == "1":
            sys.exit("no licence")
"""


@pytest.mark.multiproc
def test_a_rank_on_which_a_plugin_calls_sys_exit_ends_the_run_as_a_fault_of_that_plugin(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    ran = run_forked(tiny(tmp_path / "run", {"optimizer.rule": f"{tmp_path}/leaves.py:Leaves"}, nproc=2))
    assert ran.code == ExitCode.PLUGIN, ran.message
    assert ran.message.startswith("a plugin ended the process: SystemExit: no licence (leaves.py, line 12)")
    assert "rank 1, log: " in ran.message


class Ids(DataSource):
    """A source whose samples are what it is told."""

    vocab_size = 50

    def __init__(self, sample: Any) -> None:
        self._sample = sample

    def dataset(self, split: str, sequence_length: int, seed: int) -> Any:
        return [self._sample]


GOOD = {"tokens": np.arange(4), "labels": np.arange(4) + 46, "loss_mask": np.ones(4, np.float32)}


def test_a_sample_that_keeps_the_contract_passes_unchanged() -> None:
    source = Ids(GOOD)
    assert open_split(from_object(source), source, "train", 4, 0, 8)[0] is GOOD


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": np.array([0, 1, 2, 50])},
        {"labels": np.array([0, 1, -1, 2])},
        {"tokens": np.ones(4, np.float32)},
        {"labels": np.ones(3, np.int64)},
        {"tokens": [1, 2, 3, 4]},
        {"loss_mask": np.array([1, 0, np.nan, 1], np.float32)},
        {"loss_mask": np.array([1, 2, 0, 1], np.float32)},
        {"loss_mask": np.ones(3, np.float32)},
        {"loss_mask": np.ones(4)},
        {"loss_mask": [1.0, 1.0, 1.0, 1.0]},
        {"title": "a text that no model reads"},
        {"title": np.array(["a", None], object)},
    ],
)
def test_a_sample_that_breaks_the_contract_is_named(wrong: dict[str, Any]) -> None:
    source = Ids({**GOOD, **wrong})
    with pytest.raises(DataError, match=rf"train sample 0 of plugin data=ids .*: {next(iter(wrong))}"):
        open_split(from_object(source), source, "train", 4, 0, 8)[0]


def test_a_value_of_the_loss_mask_that_is_none_is_quoted() -> None:
    source = Ids({**GOOD, "loss_mask": np.array([1, 0, np.nan, 1], np.float32)})
    with pytest.raises(DataError, match=r"data=ids .*: loss_mask\[2\] is nan, and must be 0 or 1 "):
        open_split(from_object(source), source, "train", 4, 0, 8)[0]


class Packed(Ids):
    """It packs documents, and has a field of its own."""

    @property
    def fields(self) -> tuple[Field, ...]:
        return (*super().fields, DOCUMENTS, POSITIONS, Field("weights", "float32", ("s", 2)))


PACKED = {
    **GOOD,
    "documents": np.array([0, 1, 4]),
    "positions": np.array([0, 0, 1, 2]),
    "weights": np.ones((4, 2), np.float32),
}


def test_fields_that_are_what_was_declared_pass() -> None:
    source = Packed(PACKED)
    assert open_split(from_object(source), source, "train", 4, 0, 1)[0] is PACKED


@pytest.mark.parametrize(
    "wrong",
    [
        {"documents": np.array([0, 3, 2, 4])},
        {"documents": np.array([1, 4])},
        {"documents": np.array([0, 3])},
        {"documents": np.array([0, 4], np.int32)},
        {"positions": np.array([0, 1, 2, 4])},
        {"weights": np.ones((4, 3), np.float32)},
        {"weights": [1, 2]},
    ],
)
def test_a_field_that_is_not_what_was_declared_is_named(wrong: dict[str, Any]) -> None:
    source = Packed({**PACKED, **wrong})
    with pytest.raises(DataError, match=rf"train sample 0 of plugin data=packed .*: {next(iter(wrong))}"):
        open_split(from_object(source), source, "train", 4, 0, 1)[0]


def test_a_sample_that_cannot_be_read_is_the_plugins_fault() -> None:
    source = Ids(GOOD)
    with pytest.raises(PluginError, match=r"data=ids .* validation sample 3 failed: IndexError"):
        open_split(from_object(source), source, "validation", 4, 0, 8)[3]


class Leaving(Ids):
    def dataset(self, split: str, sequence_length: int, seed: int) -> Any:
        sys.exit("no corpus")


def test_a_source_that_calls_sys_exit_is_named() -> None:
    source = Leaving(GOOD)
    with pytest.raises(PluginError, match=r"data=leaving .* opening split train failed: SystemExit: no corpus"):
        open_split(from_object(source), source, "train", 4, 0, 8)


class Doubling(Scaler):
    """A scaler of which each fault can be switched on."""

    def __init__(
        self, *, moves: bool = False, state: bool = True, shape: tuple[int, ...] = (1,), key: str = "scale"
    ) -> None:
        self._scale, self._moves, self._state, self._key = torch.full(shape, 4.0), moves, state, key

    @property
    def scale(self) -> torch.Tensor:
        return self._scale

    def update(self, found_inf: torch.Tensor) -> None:
        assert len(found_inf) == 1
        if self._moves:
            self._scale = self._scale * 2
        else:
            self._scale.mul_(2)

    def state_dict(self) -> dict[str, float]:
        return {"scale": self._scale.item()} if self._state else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._scale.fill_(state[self._key])


def test_a_scaler_is_held_to_its_contract() -> None:
    def checked(scaler: Scaler) -> CheckedScaler:
        return CheckedScaler(scaler, from_object(scaler))

    good = checked(Doubling())
    for expected in (4.0, 8.0, 16.0):
        assert good.scale.item() == expected
        good.check_state(expected)
        good.update(torch.zeros(1))
    with pytest.raises(PluginError, match=r"scaler=doubling .* \[\], and must be torch.float32 \[1\]"):
        checked(Doubling(shape=()))
    moving = checked(Doubling(moves=True))
    moving.update(torch.zeros(1))
    with pytest.raises(PluginError, match=r"scaler=doubling .* moved"):
        _ = moving.scale
    stateless = checked(Doubling(state=False))
    stateless.check_state(4.0)
    with pytest.raises(PluginError, match=r"scaler=doubling .* from 4 to 8"):
        stateless.check_state(8.0)


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 0.0, -2.0])
def test_a_scale_that_scales_nothing_is_refused_in_the_step_that_used_it(scale: float) -> None:
    doubling = Doubling()
    with pytest.raises(PluginError, match=rf"scaler=doubling .* update failed: the scale became {scale:g}, and must"):
        CheckedScaler(doubling, from_object(doubling)).check_state(scale)


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_it_is_written() -> None:
    doubling = Doubling()
    checked = CheckedScaler(doubling, from_object(doubling))
    doubling.scale.fill_(float("inf"))  # by the update of the step that is saved
    with pytest.raises(PluginError, match=r"scaler=doubling .* state_dict failed: scale is inf, and must be finite"):
        checked.state_dict()


def test_a_state_that_cannot_be_loaded_is_the_plugins_fault() -> None:
    doubling = Doubling(key="s")
    checked = CheckedScaler(doubling, from_object(doubling))
    says = r"scaler=doubling .* load_state_dict failed: KeyError: 's'; the saved state has scale"
    with pytest.raises(PluginError, match=says):
        checked.load_state_dict({"scale": 8.0})
    with pytest.raises(PluginError, match=r"scaler=doubling .* update failed: TypeError"):
        checked.update(None)  # type: ignore[arg-type]  # a plugin that raises
