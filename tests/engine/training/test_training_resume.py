"""A resumed run is the run that never stopped: the same numbers from there on, and the same state, bit for bit."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch

from megatron_run.errors import CheckpointError, DataError, ExitCode, Problems
from megatron_run_engine.builtin.data.mock import MockDataset
from megatron_run_engine.checkpoint.manifest import read_manifest
from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.optim import FlatOptimizer
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_engine.training.numbers import Progress
from megatron_run_engine.training.state.reading import StateReader
from tests.support.resuming import SMALL, Attempt, attempt, only_step
from tests.support.saved_steps import State, read_all, same_state

#: fp16 with a scale that overflows again and again, dropout, a batch that grows, a weight decay that moves.
HARD = {
    **SMALL,
    "train.steps": 20,
    "train.precision": "fp16",
    "scaler.initial_loss_scale": 2.0**22,
    "scaler.loss_scale_window": 2,
    "scaler.hysteresis": 1,
    "model.dropout": 0.1,
    "train.ramp_up": {"start": 2, "increment": 1, "samples": 20},
    "train.weight_decay_end": 0.1,
    "train.weight_decay_shape": "cosine",
    "checkpoint.interval": 1,
    "checkpoint.keep": 20,
}
#: Amid overflows, where the batch is about to grow, within a window of good steps, and before the last step.
BY_DAY = (1, 5, 9, 19)
night = pytest.mark.nightly
FAST = {**SMALL, "train.steps": 6, "checkpoint.interval": 2, "checkpoint.keep": 9}


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Attempt]:
    """A run of 20 steps, all saved."""
    folder = tmp_path_factory.mktemp("hard")
    return folder, attempt(folder, HARD)


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Attempt]:
    """A run of 6 steps, saved at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("fast")
    return folder, attempt(folder, FAST)


def state(folder: Path, step: int) -> State:
    return read_all(Checkpoints(folder / "checkpoints"), step)


def steps(folder: Path) -> list[int]:
    return Checkpoints(folder / "checkpoints").steps()


def test_the_uninterrupted_run_has_all_that_is_hard(hard: tuple[Path, Attempt]) -> None:
    _, whole = hard
    numbers = whole.numbers.values()
    assert 3 <= sum(each["skipped"] for each in numbers) <= 12
    assert len({each["loss_scale"] for each in numbers}) > 3
    assert {each["microbatches"] for each in numbers} == {2, 3, 4}
    assert whole.saved == list(range(1, 21))


@pytest.mark.parametrize("step", [step if step in BY_DAY else pytest.param(step, marks=night) for step in range(1, 20)])
def test_a_run_resumed_at_any_step_goes_on_bit_for_bit(step: int, hard: tuple[Path, Attempt], tmp_path: Path) -> None:
    source, whole = hard
    resumed = attempt(only_step(source, step, tmp_path / "run"), HARD)
    assert resumed.first == step + 1
    assert resumed.numbers == {later: whole.numbers[later] for later in range(step + 1, 21)}
    assert same_state(state(tmp_path / "run", 20), state(source, 20))
    about = [Checkpoints(folder / "checkpoints").manifest(20).about for folder in (source, tmp_path / "run")]
    assert (about[0].counters, about[0].scaler) == (about[1].counters, about[1].scaler)


def test_a_stopped_run_is_saved_at_once_and_goes_on(fast: tuple[Path, Attempt], tmp_path: Path) -> None:
    source, whole = fast
    stopped = attempt(tmp_path, FAST, stop_after=3)
    assert (stopped.code, stopped.saved) == (ExitCode.SIGTERM, [2, 3])
    resumed = attempt(tmp_path, FAST)
    assert (resumed.code, resumed.saved) == (ExitCode.DONE, [4, 6])
    assert {**stopped.numbers, **resumed.numbers} == whole.numbers
    assert same_state(state(tmp_path, 6), state(source, 6))


def test_a_finished_run_that_is_resumed_has_nothing_left_to_do(fast: tuple[Path, Attempt], tmp_path: Path) -> None:
    again = attempt(only_step(fast[0], 6, tmp_path / "run"), FAST)
    assert (again.first, again.numbers, again.code) == (7, {}, ExitCode.DONE)


def test_without_an_interval_a_run_is_saved_at_its_end(tmp_path: Path) -> None:
    assert attempt(tmp_path, {**FAST, "checkpoint.interval": 0}).saved == [6]


def test_a_time_limit_ends_the_step_and_saves(tmp_path: Path) -> None:
    from megatron_run.planning import load_config
    from megatron_run_engine.launch.worker import stop_request, train_in_folder
    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.runtime.world import World

    sets = {**FAST, "run.time_limit": "0.001 s", "observer.use": "jsonl"}
    run = load_config("preset:tiny", sets=sets)
    code = train_in_folder(run, World(), RunFolder(tmp_path, 1), stop_request(run))
    assert code is ExitCode.TIME_LIMIT
    assert steps(tmp_path) == [1]


def test_a_step_by_its_number_is_resumed_and_newer_ones_are_set_aside(
    fast: tuple[Path, Attempt], tmp_path: Path
) -> None:
    source, whole = fast
    attempt(tmp_path, FAST)
    back = attempt(tmp_path, FAST, resume="2", stop_after=3, number=2)
    assert (back.first, back.numbers) == (3, {3: whole.numbers[3]})
    assert steps(tmp_path) == [2, 3]
    assert Checkpoints(tmp_path / "checkpoints").hint() == 3
    left = {entry.name for entry in (tmp_path / "checkpoints").iterdir() if "aside" in entry.name}
    assert left == {"step4-set-aside-by-attempt-002", "step6-set-aside-by-attempt-002"}
    attempt(tmp_path, FAST, number=3)
    assert same_state(state(tmp_path, 6), state(source, 6))


def test_never_starts_again(fast: tuple[Path, Attempt], tmp_path: Path) -> None:
    again = attempt(only_step(fast[0], 6, tmp_path / "run"), FAST, resume="never", stop_after=1)
    assert again.first == 1
    assert steps(tmp_path / "run") == [1]


def refused(folder: Path, sets: dict[str, Any], **asked: Any) -> str:
    """What is said when the run in ``folder`` cannot be resumed; nothing has been loaded by then."""
    with mock.patch.object(FlatOptimizer, "load_state") as load, pytest.raises((CheckpointError, DataError)) as error:
        attempt(folder, sets, **asked)
    load.assert_not_called()
    assert error.value.exit_code == ExitCode.DATA
    return str(error.value)


def test_a_damaged_step_is_named_and_nothing_older_is_taken_in_silence(
    fast: tuple[Path, Attempt], tmp_path: Path
) -> None:
    only_step(fast[0], 2, tmp_path)
    only_step(fast[0], 4, tmp_path)
    shard = tmp_path / "checkpoints" / "step4" / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    said = refused(tmp_path, FAST)
    assert f"{shard} is damaged" in said
    assert said.endswith("to resume from step 2: --resume 2")
    assert attempt(tmp_path, FAST, resume="2").numbers == {step: fast[1].numbers[step] for step in range(3, 7)}


def test_counters_of_no_such_step_are_refused(fast: tuple[Path, Attempt]) -> None:
    folder = fast[0]
    about = read_manifest(folder / "checkpoints" / f"step{steps(folder)[-1]}").about
    assert Progress.restored(about.step, about.counters, about.losses).step == about.step
    for change in ({"step": about.step + 1}, {"invented": 3}):
        with pytest.raises(CheckpointError, match="cannot be resumed"):
            Progress.restored(about.step, {**about.counters, **change}, about.losses)


def test_another_configuration_is_refused_with_its_keys(fast: tuple[Path, Attempt], tmp_path: Path) -> None:
    said = refused(only_step(fast[0], 2, tmp_path), {**FAST, "train.lr": 0.5})
    assert said == (
        "step 2 belongs to another run: train.lr=0.001, now 0.5; to go on with them: --allow-change train.lr; "
        f"for a new run from its weights: another run.folder with --set run.init_from={tmp_path}"
    )


def test_changed_data_are_refused(fast: tuple[Path, Attempt], tmp_path: Path) -> None:
    only_step(fast[0], 2, tmp_path)
    with mock.patch("megatron_run_engine.builtin.data.mock.MockDataset.__len__", return_value=77, create=True):
        said = refused(tmp_path, FAST)
    assert "the training data is not what it was when step 2 was saved" in said
    assert "77 now" in said


def test_as_many_data_with_other_contents_are_refused(fast: tuple[Path, Attempt], tmp_path: Path) -> None:
    only_step(fast[0], 2, tmp_path)
    sample = MockDataset.__getitem__

    def changed(dataset: MockDataset, index: int) -> Any:
        found = dict(sample(dataset, index))
        return {**found, "labels": found["labels"][::-1]}

    with mock.patch.object(MockDataset, "__getitem__", changed):
        said = refused(tmp_path, FAST)
    assert "as many samples, with other contents" in said


def test_one_byte_of_a_text_that_changed_is_refused(tmp_path: Path) -> None:
    """Between the samples that are compared, and where it changes none of them."""
    texts = tmp_path / "a.txt"
    texts.write_text("a few words, and then some more. " * 4000)
    values = {key: value for key, value in FAST.items() if not key.startswith("data.")}
    values |= {"data.use": "text", "data.paths": [str(texts)]}
    attempt(tmp_path / "run", values, stop_after=2)
    content = bytearray(texts.read_bytes())
    content[len(content) * 3 // 5] ^= 1
    texts.write_bytes(content)
    assert f"{texts} has other contents; give the same data" in refused(tmp_path / "run", values)
    content[len(content) * 3 // 5] ^= 1
    texts.write_bytes(content)
    assert attempt(tmp_path / "run", values).first == 3


def test_who_goes_on_with_another_rule_in_the_same_file_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rule = tmp_path / "mine.py"
    text = "import torch\n\nclass Mine(torch.optim.SGD):\n    pass\n"
    rule.write_text(text)
    values = {**FAST, "optimizer.rule": f"{rule}:Mine"}
    attempt(tmp_path / "run", values, stop_after=2)
    attempt(only_step(tmp_path / "run", 2, tmp_path / "same"), values, stop_after=3)
    assert "is a file that has changed" not in caplog.text
    rule.write_text(f"{text}    factor = 9\n")
    attempt(tmp_path / "run", values)
    assert "optimizer.rule is a file that has changed since step 2 was saved" in caplog.text


def test_an_optimizer_that_keeps_more_needs_permission(tmp_path: Path) -> None:
    attempt(tmp_path, {**FAST, "optimizer.rule": "sgd"}, stop_after=2)
    with pytest.raises(CheckpointError) as error:
        attempt(tmp_path, FAST, allow_plugin_change=("scaler",))
    assert "optimizer.rule=sgd, now adamw" in str(error.value)
    assert attempt(tmp_path, FAST, allow_plugin_change=("optimizer",)).first == 3


def test_a_field_that_was_not_saved_starts_from_zeros_with_permission_only(
    fast: tuple[Path, Attempt], tmp_path: Path
) -> None:
    folder = only_step(fast[0], 2, tmp_path) / "checkpoints" / "step2"
    manifest = read_manifest(folder)
    reader, name = Reader(folder, manifest), next(iter(manifest.tensors))
    box = (name, "momentum", (0,), (3,))
    with pytest.raises(CheckpointError, match=f"has no momentum of {name}, which optimizer=own needs"):
        StateReader(reader, "optimizer=own", zeros_if_missing=False)(*box)
    assert not StateReader(reader, "optimizer=own", zeros_if_missing=True)(*box).any()


def test_a_rule_of_its_own_that_was_saved_before_its_first_update_goes_on_bit_for_bit(tmp_path: Path) -> None:
    own = {**FAST, "optimizer.rule": "torch.optim:Rprop"}

    def overflow(assembly: Any) -> None:
        unscale, steps = assembly.optimizer.unscale_, count(1)

        def spoiled(factor: torch.Tensor) -> torch.Tensor:
            if next(steps) == 1:
                main_grad(next(iter(assembly.infos[0]))).fill_(torch.inf)
            return cast("torch.Tensor", unscale(factor))

        assembly.optimizer.unscale_ = spoiled

    whole = attempt(tmp_path / "whole", own, loaded=overflow)
    assert [whole.numbers[step]["skipped"] for step in (1, 2)] == [True, False]
    stopped = attempt(tmp_path / "run", own, stop_after=1, loaded=overflow)
    assert stopped.saved == [1]
    resumed = attempt(tmp_path / "run", own)
    assert {**stopped.numbers, **resumed.numbers} == whole.numbers
    assert same_state(state(tmp_path / "run", 6), state(tmp_path / "whole", 6))


#: A rule whose moment and group make their appearance in the third step.
LATE = """
import torch


class Late(torch.optim.Optimizer):
    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                gradient = parameter.grad
                if group["k"] > 2:
                    state = self.state[parameter]
                    gradient = state.setdefault("moment", torch.zeros_like(gradient)).lerp_(gradient, 0.1)
                parameter.sub_(gradient.sign(), alpha=group["lr"] / group["k"])
"""


@pytest.mark.parametrize("optimizer", ["adamw", "zero1"])
def test_what_a_rule_of_its_own_makes_late_goes_on_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    own = {**FAST, "train.lr": 1e-2, "optimizer.rule": f"{tmp_path / 'late.py'}:Late"}
    whole = attempt(tmp_path / "whole", own)
    stopped = attempt(tmp_path / "run", own, (f"optimizer={optimizer}",), stop_after=4)
    resumed = attempt(tmp_path / "run", own, (f"optimizer={optimizer}",))
    assert {**stopped.numbers, **resumed.numbers} == whole.numbers
    assert same_state(state(tmp_path / "run", 6), state(tmp_path / "whole", 6))


@pytest.mark.parametrize(("before", "after"), [("adamw", "zero1"), ("zero1", "adamw")])
def test_another_optimizer_reads_the_same_fields(
    before: str, after: str, fast: tuple[Path, Attempt], tmp_path: Path
) -> None:
    attempt(tmp_path, FAST, (f"optimizer={before}",), stop_after=3)
    resumed = attempt(tmp_path, FAST, (f"optimizer={after}",))
    assert resumed.numbers == {step: fast[1].numbers[step] for step in (4, 5, 6)}
    assert same_state(state(tmp_path, 6), state(fast[0], 6))


def test_a_plugin_that_is_gone_is_named_with_the_version_that_saved(hard: tuple[Path, Attempt]) -> None:
    from megatron_run.registry.discover import Catalog

    folder, _ = hard
    offering = Catalog.offering

    def without_scalers(catalog: Catalog, kind: str, name: str) -> Any:
        return () if kind == "scaler" else offering(catalog, kind, name)

    with mock.patch.object(Catalog, "offering", without_scalers), pytest.raises(Problems) as error:
        attempt(folder, {**HARD, "run.folder": str(folder)})
    assert f"step 20 of {folder} was saved with megatron-run-scaler-dynamic==0.1.0" in str(error.value)


def test_another_scaler_needs_permission_and_the_one_that_saved_is_named(
    hard: tuple[Path, Attempt], tmp_path: Path
) -> None:
    folder = only_step(hard[0], 3, tmp_path / "run")
    fixed = {key: value for key, value in HARD.items() if not key.startswith("scaler.")}
    fixed["scaler.loss_scale"] = 1024.0
    said = refused(folder, fixed)
    assert "scaler=dynamic, which scaler=constant cannot read" in said
    assert "megatron-run-scaler-dynamic==0.1.0" in said
    assert said.endswith("--allow-plugin-change scaler")
    resumed = attempt(folder, fixed, allow_plugin_change=("scaler",), stop_after=4)
    assert resumed.numbers[4]["loss_scale"] == 1024.0
