"""Whose fault it is that copies differ, by what each rank's weights were when the same steps were done before."""

from __future__ import annotations

import pytest
import torch

from megatron_run_engine.training.health.replay import Finding, Moment, Verdict, find_faulty
from megatron_run_engine.training.health.replicas import Difference, bit_sum

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
        ([(4, USED), None, (4, USED), None], {0, 2}, Finding((0, 2), 4)),
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
