"""Whose fault it is that copies differ, by what each rank's weights were when the same steps were done before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_run.errors import CheckpointError
from megatron_run_engine.training.health.replay import Finding, Moment, Replay, Verdict, find_faulty
from megatron_run_engine.training.health.replicas import Difference, bit_sum
from megatron_run_engine.training.numbers import Progress
from tests.support.saved_steps import Alone

CPU = torch.device("cpu")
#: The weights that a step uses, and those that it makes.
USED, MADE = False, True


@pytest.mark.parametrize(
    ("firsts", "suspects", "found"),
    [
        ([None, (5, USED)], {0, 1}, Finding((1,), 5)),
        ([(6, USED), (5, USED)], {0, 1}, Finding((1,), 5)),
        ([(6, USED), (6, MADE), (6, USED), (5, MADE)], {3}, Finding((3,), 5)),
        ([(6, MADE), (6, USED)], {0, 1}, Finding((1,), 6)),
        ([(4, USED), None, (4, USED), None, None], {0, 2}, Finding((0, 2), 4)),
        ([(4, USED), None, (4, USED), None], {0, 2}, Finding((), 4)),
        ([(4, USED), (4, USED), None], {0, 1, 2}, Finding((), 4)),
        ([(4, USED), (4, USED)], {0, 1}, Finding((), 4)),
        ([(4, USED), None, None], {1}, Finding((), 4)),
        ([None, None], {0, 1}, Finding(repeats=True)),
    ],
)
def test_the_rank_whose_weights_were_others_first_is_at_fault(
    firsts: list[Moment | None], suspects: set[int], found: Finding
) -> None:
    """Before others take in its gradients; not where most differ at once, nor one whose copies are like the others."""
    assert find_faulty(firsts, suspects) == found


def test_what_differs_after_another_step_than_before_is_no_repetition() -> None:
    assert find_faulty([None, None], {0, 1}, alike=False) == Finding()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Finding((1,), 7), "rank 1 alone has other weights than before, since step 7"),
        (Finding((0, 3), 7), "ranks 0 and 3 alone have other weights than before, since step 7"),
        (Finding(repeats=True), "every rank has the same weights again"),
        (Finding((), 7), "no rank alone has others than before"),
    ],
)
def test_a_verdict_reads_as_a_reason(found: Finding, words: str) -> None:
    assert str(Verdict(9, Difference("a", (0, 1), (), 0), 6, *found)) == f"done again from step 6, {words}"


#: What is found to differ after step 6.
FOUND = Difference("a", (0, 1), (), 0)


def at(step: int, rewinds: int = 0) -> Progress:
    return Progress(step=step, rewinds=rewinds)


def begun(weights: torch.Tensor, progress: Progress, saved: Progress | None) -> tuple[Replay, Progress | None]:
    """A rank whose copies differ after ``progress``, and what it goes back to, where ``saved`` is the last step."""
    context = SimpleNamespace(device=CPU, log=mock.Mock())
    assembly: Any = SimpleNamespace(infos=[{weights: None}], optimizer=None, context=context)
    replay, checkpoints = Replay(assembly, Alone()), mock.Mock(reload_newest=lambda **_: saved)
    replay.note(4)
    replay.saving()
    passed(replay)
    return replay, replay.begin(progress, FOUND, checkpoints)


def passed(replay: Replay) -> None:
    """Steps 5 and 6 are done, and the copies compared."""
    for step, made in ((5, USED), (6, USED), (6, MADE)):
        replay.note(step, made=made)


def test_the_verdict_comes_once_all_is_done_again_or_copies_differ_before() -> None:
    replay, back = begun(torch.ones(3), at(6), at(4))
    assert back == at(4)
    assert replay.verdict(at(5), None) is None
    early, whole = replay.verdict(at(5), FOUND), replay.verdict(at(6), None)
    assert early == whole == Verdict(6, FOUND, 4, (), 0, repeats=False)
    passed(replay)
    again = replay.verdict(at(6), FOUND)
    assert again is not None
    assert again.repeats


def test_weights_that_are_others_this_time_are_seen_in_the_step_that_used_them() -> None:
    weights = torch.ones(3)
    replay, _ = begun(weights, at(6), at(4))
    replay.note(4)  # no step that was done before
    replay.note(5)
    weights[1] = 2.0
    replay.note(6)
    found = replay.verdict(at(6), FOUND)
    assert found is not None
    assert (found.since, found.repeats, found.faulty) == (6, False, ()), "a rank alone has nobody to differ from"


@pytest.mark.parametrize("saved", [None, at(4, rewinds=1)])
def test_without_a_saved_step_or_with_samples_dropped_since_nothing_is_done_again(saved: Progress | None) -> None:
    replay, back = begun(torch.ones(3), at(6, rewinds=2), saved)
    assert back is None
    assert replay.verdict(at(6, rewinds=2), FOUND) is None


def test_where_no_saved_step_can_be_read_the_run_stops_for_what_was_found() -> None:
    log, unreadable = mock.Mock(), CheckpointError("step 4 in memory is not what it was")
    assembly: Any = SimpleNamespace(infos=[], optimizer=None, context=SimpleNamespace(device=CPU, log=log))
    replay = Replay(assembly, Alone())
    assert replay.begin(at(6), FOUND, mock.Mock(reload_newest=mock.Mock(side_effect=unreadable))) is None
    assert replay.verdict(at(6), FOUND) is None
    log.warning.assert_called_once_with("no step can be done again: %s", unreadable)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("start", range(5))
def test_every_flipped_bit_changes_the_sum_wherever_memory_begins(dtype: torch.dtype, start: int) -> None:
    values = torch.arange(start, start + 13).to(dtype)[start:]
    before, memory = bit_sum([values], CPU), values.view(torch.uint8)
    sums = {int(before)}
    for place in range(len(memory)):
        for bit in range(8):
            memory[place] ^= 1 << bit
            sums.add(int(bit_sum([values], CPU)) - int(before))
            memory[place] ^= 1 << bit
    assert 0 not in sums
    assert torch.equal(bit_sum([values], CPU), before)


def test_the_sum_is_that_of_whole_integers() -> None:
    integers = torch.tensor([3, -(2**62), 2**62, 5])
    assert bit_sum([integers.view(torch.float32), integers[1:]], CPU) == int(integers.sum() + integers[1:].sum())
    assert bit_sum([], CPU) == 0
