"""A loss that is not finite, or a spike: what a run says, and what it does about it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_run.errors import CheckpointError, ExitCode, GuardError
from megatron_run_engine.checkpoint.saving import Saver
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.training.health.guards import _merged, spike_limit
from tests.support.training_bench import Bench

Change = Callable[[int, int, torch.Tensor], torch.Tensor]
#: As many samples a step as the preset has, in fewer operations.
TINY = ("model.num_layers=2", "model.hidden_size=16", "train.sequence_length=8", "train.micro_batch_size=4")
#: A window that is full before step 9.
SMALL = (*TINY, "train.steps=12", "guard.spike_window=8", "eval.interval=0", "eval.batches=1")


def times(factor: float, *steps: int) -> Change:
    return lambda begun, _, total: total * factor if begun in steps else total


def spiked(folder: Path, action: str, *sets: str, steps: tuple[int, ...] = (10,)) -> Bench:
    """A run whose loss is nine times as large in ``steps``."""
    bench = Bench(folder, *SMALL, f"guard.spike={action}", *sets)
    bench.spoil_losses(times(9.0, *steps))
    return bench


def kept(bench: Bench) -> list[torch.Tensor]:
    """The weights after each step."""
    found: list[torch.Tensor] = []
    bench.watch.after_step = lambda: found.append(bench.weights())
    return found


def test_the_limit_is_that_of_median_and_median_absolute_deviation() -> None:
    losses = np.random.default_rng(0).normal(3.0, 0.2, 101)
    deviation = 1.4826 * np.median(np.abs(losses - np.median(losses)))
    assert spike_limit(losses.tolist(), 5.0) == pytest.approx(np.median(losses) + 5 * deviation)
    wild = np.concatenate((losses[:60], np.full(41, 1e6)))  # robust: what was a spike itself hardly moves the limit
    assert spike_limit(wild.tolist(), 5.0) < 6
    assert spike_limit([2.0] * 9, 10.0) == pytest.approx(2.2), "a loss that does not move needs more than rounding"


def test_a_spike_is_said_and_trained_on(tmp_path: Path) -> None:
    plain, bench = Bench(tmp_path, *SMALL), spiked(tmp_path, "continue")
    plain.train()
    bench.train()
    (line,) = bench.said
    assert line.startswith("the loss of step 10 is ")
    assert line.endswith("; training continues")
    assert not any(step.skipped for step in bench.watch.steps)
    assert torch.equal(bench.weights(), plain.weights())
    assert not plain.said


def test_no_loss_is_a_spike_before_the_window_is_full(tmp_path: Path) -> None:
    bench = spiked(tmp_path, "skip", steps=(8,))
    bench.train()
    assert not bench.said


def test_the_update_of_a_spike_is_skipped_and_its_loss_is_no_measure(tmp_path: Path) -> None:
    bench = spiked(tmp_path, "skip", steps=(10, 11))
    weights = kept(bench)
    bench.train()
    assert [step.step for step in bench.watch.steps if step.skipped] == [10, 11]
    assert torch.equal(weights[8], weights[10])
    assert not torch.equal(weights[10], weights[11])
    assert bench.trainer._progress.losses == tuple(s.loss for s in bench.watch.steps[1:9] + bench.watch.steps[11:])[-8:]
    assert bench.read == [8 * step for step in range(12)]


def test_spikes_in_a_row_stop_the_run(tmp_path: Path) -> None:
    bench = spiked(tmp_path, "skip", "train.max_skips=2", steps=(10, 11))
    with pytest.raises(GuardError, match=r"2 steps in a row were skipped: last at step 11: the loss .* a spike above"):
        bench.train()


@pytest.mark.parametrize("behind", ["false", "true"])
def test_a_rewind_goes_back_to_the_last_saved_step_and_past_the_samples_since(tmp_path: Path, behind: str) -> None:
    bench = spiked(tmp_path, "rewind", "checkpoint.interval=8", f"checkpoint.async_save={behind}")
    weights, began = kept(bench), list[torch.Tensor]()
    zero_grad = bench.assembly.optimizer.zero_grad

    def watched() -> None:
        began.append(bench.weights())
        zero_grad()

    cast("Any", bench.assembly.optimizer).zero_grad = watched
    bench.train()
    assert [step.step for step in bench.watch.steps] == [*range(1, 11), *range(9, 13)]
    assert bench.read == [*range(0, 80, 8), *range(80, 112, 8)]  # 64 to 79 are passed over, and come no more
    assert torch.equal(began[10], weights[7])
    assert not torch.equal(weights[7], weights[8])
    assert "back to step 8, past the samples 64 to 79" in bench.said
    progress = bench.trainer._progress
    assert (progress.step, progress.samples, progress.dropped, progress.rewinds) == (12, 96, 16, 1)
    assert [step.samples for step in bench.watch.steps][10:] == [72, 80, 88, 96]


def held_up(bench: Bench, then: Callable[[], None]) -> Any:
    """A patch: saving step 8 takes until after the spike of step 10, does ``then``, and goes on."""
    spiked, save = threading.Event(), Saver.save

    def after_step() -> None:
        if bench.watch.steps[-1].step == 10:
            threading.Timer(0.1, spiked.set).start()

    bench.watch.after_step = after_step

    def late(saver: Saver, about: Any, *rest: Any) -> int:
        if about.step == 8:
            assert spiked.wait(20)
            then()
        return save(saver, about, *rest)

    return mock.patch.object(Saver, "save", late)


def test_a_rewind_waits_for_the_step_that_is_being_saved_and_tells_of_it(tmp_path: Path) -> None:
    bench = spiked(tmp_path, "rewind", "checkpoint.interval=8", "checkpoint.async_save=true")
    with held_up(bench, lambda: None):
        bench.train()
    assert [step.step for step in bench.watch.steps] == [*range(1, 11), *range(9, 13)]
    assert bench.watch.saved == [8, 12]


def test_a_step_that_could_not_be_saved_ends_the_run_that_wants_to_go_back_to_it(tmp_path: Path) -> None:
    def fail() -> None:
        raise CheckpointError("step 8 could not be saved")

    bench = spiked(tmp_path, "rewind", "checkpoint.interval=8", "checkpoint.async_save=true")
    with held_up(bench, fail), pytest.raises(CheckpointError, match="step 8 could not be saved"):
        bench.train()


def test_no_sample_is_read_twice_however_often_the_run_goes_back(tmp_path: Path) -> None:
    bench = spiked(tmp_path, "rewind", "checkpoint.interval=1", steps=(10, 12))
    bench.train()
    assert [step.step for step in bench.watch.steps] == [*range(1, 11), 10, 11, 11, 12]
    assert bench.read == [*range(0, 14 * 8, 8)]
    assert (bench.trainer._progress.dropped, bench.trainer._progress.rewinds) == (16, 2)


def test_what_a_rewind_changed_is_saved(tmp_path: Path) -> None:
    bench = spiked(tmp_path, "rewind", "checkpoint.interval=8")
    bench.train()
    about = Checkpoints(bench.trainer._folder.checkpoints).manifest(12).about
    assert {**about.counters, "losses": about.losses} == asdict(bench.trainer._progress)
    assert (about.counters["dropped"], len(about.losses)) == (16, 8)


def test_a_run_that_went_back_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole = spiked(tmp_path, "rewind", "checkpoint.interval=8")
    whole.train()
    stopped = spiked(tmp_path, "rewind", "checkpoint.interval=8")
    stopped.watch.after_step = lambda: len(stopped.watch.steps) == 11 and stopped.stop.stop(ExitCode.SIGTERM)
    stopped.train()
    assert stopped.trainer._progress.step == 10
    again = Bench(stopped.folder, *SMALL, "guard.spike=rewind", "checkpoint.interval=8", again=True)
    again.trainer.resume()
    assert again.trainer.beginning.first_step == 11
    again.train()
    assert again.trainer._progress == whole.trainer._progress
    assert torch.equal(again.weights(), whole.weights())
    assert again.read == whole.read[-2:]


def test_where_nothing_is_saved_yet_the_spike_is_skipped(tmp_path: Path) -> None:
    bench = spiked(tmp_path, "rewind", "checkpoint.interval=0")
    bench.train()
    assert [step.step for step in bench.watch.steps if step.skipped] == [10]
    assert "step 10 is skipped: nothing is saved yet that the run could go back to" in bench.said
    assert bench.trainer._progress.dropped == 0
    assert Checkpoints(bench.trainer._folder.checkpoints).steps() == [12]


def test_a_run_goes_back_so_often_and_then_stops(tmp_path: Path) -> None:
    bench = spiked(tmp_path, "rewind", "checkpoint.interval=8", "guard.max_rewinds=2", steps=(10, 12, 14))
    with pytest.raises(GuardError, match=r"spiked again after 2 rewinds: the loss of step 10 .* or raise guard.max_re"):
        bench.train()


NOT_FINITE = [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")]


@pytest.mark.parametrize(("value", "word"), NOT_FINITE)
def test_a_loss_that_is_not_finite_is_named_and_its_update_skipped(tmp_path: Path, value: float, word: str) -> None:
    bench = Bench(tmp_path, *TINY, "train.steps=4")
    bench.spoil_losses(lambda step, microbatch, loss: loss * 0 + value if step == 2 and microbatch >= 1 else loss)
    weights = kept(bench)
    bench.train()
    assert [step.skipped for step in bench.watch.steps] == [False, True, False, False]
    assert torch.equal(weights[0], weights[1])
    (line,) = bench.said
    assert line == (
        f"step 2 is skipped: the loss lm is {word}, first seen by rank 0 (stage 0) in microbatch 1; "
        "all weights are finite"
    )
    assert len(bench.trainer._progress.losses) == 3


def test_the_first_microbatch_is_named_and_then_the_lowest_rank() -> None:
    def note(*losses: tuple[int, str, str], stage: int = 1, weights: str = "") -> dict[str, Any]:
        return {"stage": stage, "loss": min(losses, default=None), "weights": weights}

    clean, late, early = note(stage=0), note((3, "lm", "inf")), note((1, "lm", "nan"))
    assert (
        _merged([clean, late, early, early]).loss
        == "the loss lm is nan, first seen by rank 2 (stage 1) in microbatch 1"
    )
    assert _merged([clean, clean]) == ("", "")
    assert _merged([clean, note(weights="a holds nan"), note(weights="b holds inf")]).weights == "a holds nan on rank 1"


def test_it_stops_the_run_where_that_is_wanted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *TINY, "train.steps=4", "guard.nan_loss=stop")
    bench.spoil_losses(lambda step, microbatch, loss: loss * torch.nan if step == 2 else loss)
    with pytest.raises(GuardError) as caught:
        bench.train()
    assert caught.value.exit_code == 6
    assert str(caught.value) == (
        "step 2: the loss lm is nan, first seen by rank 0 (stage 0) in microbatch 0: all weights are finite; lower "
        "train.lr, lengthen train.lr_warmup, check the data, or skip such steps: guard.nan_loss=skip"
    )


def test_a_gradient_that_overflows_is_no_loss_that_does(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *TINY, "train.steps=3", "guard.nan_loss=stop")
    bench.spoil(float("inf"), {2})
    bench.train()
    assert [step.skipped for step in bench.watch.steps] == [False, True, False]
    assert not bench.said


def test_weights_that_are_spoilt_are_named_when_the_run_gives_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *TINY, "train.steps=9", "train.max_skips=3")
    name = "layers.1.mlp.input.weight"
    (victim,) = [parameter for parameter, info in bench.infos.items() if info.name == name]
    with torch.no_grad():
        victim[2, 5] = torch.inf
    with pytest.raises(GuardError) as caught:
        bench.train()
    assert f"; {name} holds inf on rank 0; resume from an earlier saved step: --resume STEP" in str(caught.value)


def test_no_parameter_is_on_its_way_when_a_run_was_asked_to_stop(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *TINY, "train.steps=9", "optimizer.use=zero1")
    bench.stop.stop(ExitCode.SIGTERM)
    bench.train()
    assert len(bench.watch.steps) == 1
    assert not cast("Any", bench.assembly.optimizer)._arriving


def test_no_parameter_is_on_its_way_when_a_guard_ends_a_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *TINY, "train.steps=9", "optimizer.use=zero1", "guard.nan_loss=stop")

    def not_finite(step: int, microbatch: int, loss: torch.Tensor) -> torch.Tensor:
        bench.assembly.optimizer.start_param_sync()  # as of a parameter that no segment has read yet
        return loss * torch.nan

    bench.spoil_losses(not_finite)
    with pytest.raises(GuardError):
        bench.train()
    assert not cast("Any", bench.assembly.optimizer)._arriving
