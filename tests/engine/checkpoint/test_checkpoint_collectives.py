"""Ranks exchange texts without objects, and fail together."""

from __future__ import annotations

import time
from typing import Any

import pytest

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.collectives import Ranks, WorldRanks, on_all_ranks, on_rank0
from tests.support.ranks import run_ranks
from tests.support.saved_steps import on_threads

#: Lengths that differ by rank, nothing at all, and letters of several bytes.
TEXTS = ("", "x", "Gr\u00fc\u00dfe \U0001f642" * 100)


def exchange(rank: int, world: int) -> list[Any]:
    import torch
    import torch.distributed as dist

    from megatron_run_engine.runtime.comm import Groups

    ranks = WorldRanks(Groups(world=dist.group.WORLD), rank, world, torch.device("cpu"))
    gathered = ranks.gather(TEXTS[rank])
    return [list(gathered), [ranks.broadcast(text if rank == 0 else "not this") for text in TEXTS]]


@pytest.mark.multiproc
def test_texts_of_any_length_travel_between_ranks() -> None:
    results = run_ranks(exchange, 3)
    assert [gathered for gathered, _ in results] == [list(TEXTS), [], []]
    assert all(told == list(TEXTS) for _, told in results)


def test_a_failure_of_one_rank_is_raised_on_all_with_its_number() -> None:
    def work(ranks: Ranks) -> int:
        def divide() -> int:
            time.sleep(0.01 * ranks.rank)
            return 1 // (ranks.rank - 2)

        return on_all_ranks(ranks, divide)

    ends = on_threads(4, work)
    for end in ends:
        assert isinstance(end, CheckpointError)
        assert str(end) == "ZeroDivisionError: integer division or modulo by zero (from rank 2)"


def test_a_failure_that_all_share_names_no_rank() -> None:
    def work(ranks: Ranks) -> None:
        def fail() -> None:
            raise CheckpointError("it is damaged", fix="do something")

        on_all_ranks(ranks, fail)

    assert {str(end) for end in on_threads(3, work)} == {"it is damaged; do something"}


def test_each_rank_keeps_its_own_result() -> None:
    assert on_threads(3, lambda ranks: on_all_ranks(ranks, lambda: ranks.rank * 10)) == [0, 10, 20]


def test_what_the_first_rank_says_all_hear_and_only_it_works() -> None:
    worked = []

    def work(ranks: Ranks) -> str:
        def speak() -> str:
            worked.append(ranks.rank)
            return "said"

        return on_rank0(ranks, speak)

    assert on_threads(3, work) == ["said"] * 3
    assert worked == [0]


def test_an_interrupt_of_the_first_rank_is_raised_there_and_told_to_the_others() -> None:
    """Ctrl-C is no Exception, and the others wait for a word."""

    def work(ranks: Ranks) -> str:
        def interrupted() -> str:
            raise KeyboardInterrupt

        try:
            return on_rank0(ranks, interrupted)
        except KeyboardInterrupt:
            return "interrupted"

    first, *others = on_threads(3, work)
    assert first == "interrupted"
    assert [(type(end), str(end)) for end in others] == [(CheckpointError, "KeyboardInterrupt")] * 2
