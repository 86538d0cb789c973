"""The campaign of compositions: what it draws, what it sees, and how it makes a failure simple."""

from __future__ import annotations

from random import Random

import pytest

from tests.compose import __main__ as campaign
from tests.compose.compare import Compared, compare, faults
from tests.compose.draw import CARRIED_OUT, LEARNED, Composition

#: Two data-parallel ranks, and nothing else.
TWO = Composition((("ranks", 3),))
#: What a run may get wrong by little, in fp32.
SLIGHT = ("train.weight_decay=0.051", "train.clip_norm=0.299", "model.norm_eps=1.2e-5", "optimizer.betas=0.9,0.9991")


def test_every_option_of_every_axis_is_drawn_and_the_same_seed_draws_the_same() -> None:
    drawn = [Composition.drawn(random) for random in [Random(5)] for _ in range(600)]
    chosen = {choice for composition in drawn for choice in composition.choices}
    for axis in (*LEARNED, *CARRIED_OUT):
        assert {number for name, number in chosen if name == axis.name} == set(range(1, len(axis.options)))
    assert drawn[0] == Composition.drawn(Random(5))


def test_the_single_process_learns_the_same_and_shares_nothing_of_how() -> None:
    composition = Composition((("ranks", 5), ("clip", 1), ("recompute", 1), ("then", 4)))
    assert composition.reference.nproc == 1
    assert "train.clip_norm=0" in composition.reference.sets
    assert "train.recompute=full" not in composition.reference.sets
    assert [request.nproc for request in composition.attempts] == [4, 2]
    assert all("train.recompute=full" in request.sets for request in composition.attempts)


def test_a_failure_is_made_simple(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(compositions: list[Composition]) -> list[Compared]:
        needed = {("ranks", 5), ("recompute", 2)}
        return [Compared(fault="both" if needed <= set(each.choices) else "") for each in compositions]

    monkeypatch.setattr(campaign, "compare", wrong)
    found = Composition((("ranks", 5), ("norm", 1), ("recompute", 2), ("save", 1), ("eval", 1)))
    assert campaign.simplest(found) == Composition((("ranks", 5), ("recompute", 2)))


@pytest.mark.multiproc
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_what_is_equal_is_equal_and_what_differs_by_little_is_seen() -> None:
    (equal,) = compare([TWO])
    assert equal is not None
    assert not faults(equal)
    for slight in SLIGHT:
        (found,) = compare([TWO], [slight])
        assert found is not None
        assert faults(found), f"{slight} is not seen: {found.largest}"
