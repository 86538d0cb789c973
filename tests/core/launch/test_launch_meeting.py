"""Ranks that compare notes; each is a thread with its own place in the world."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from megatron_run.errors import InputError, PluginError, RankLostError
from megatron_run.launch.meeting import Meeting, Outcome, PeerError, attempt, check_digests
from megatron_run.world import World
from tests.support.commands import free_port

T = TypeVar("T")


def meet(place: str, size: int, work: Callable[[int, Meeting], T], *, timeout: float = 20.0) -> list[Outcome[T]]:
    """``work`` of every rank at ``place``; what each returned or raised."""

    def rank(number: int) -> Outcome[T]:
        world = World(rank=number, size=size, init_method=place, serves_store=number == 0, host=f"host{number}")
        return attempt(lambda: work(number, Meeting(world, timeout)))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'meeting'}"


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_everybody_gets_everybodys_note_by_rank(file: str, kind: str) -> None:
    place = file if kind == "file" else f"tcp://127.0.0.1:{free_port()}"

    def work(rank: int, meeting: Meeting) -> list[list[int]]:
        notes = []
        for phase in ("first", "second"):
            value, gathered = meeting.settle(phase, Outcome((rank * 10,)), lambda value: {"value": value})
            assert value == rank * 10
            notes.append([note["value"] for note in gathered])
        meeting.settle("end", Outcome((None,)))  # the store lives in rank 0: nobody leaves early
        time.sleep(0.2)
        return notes

    assert [outcome.values for outcome in meet(place, 3, work)] == [([[0, 10, 20]] * 2,)] * 3


def test_a_world_of_one_meets_itself() -> None:
    assert Meeting(World(), 1.0).settle("phase", Outcome((7,)))[0] == 7


def test_the_lowest_failing_rank_speaks_and_all_end_with_its_code(file: str) -> None:
    def work(rank: int, meeting: Meeting) -> object:
        problem = PluginError(f"rank {rank} has no plugin") if rank else None
        return meeting.settle("resolve", Outcome(() if problem else (rank,), problem))

    errors = [outcome.error for outcome in meet(file, 3, work)]
    assert [type(error) for error in errors] == [PeerError, PluginError, PeerError]
    assert [error.exit_code for error in errors if isinstance(error, PluginError | PeerError)] == [3, 3, 3]
    assert str(errors[1]) == "rank 1 has no plugin"


def test_a_rank_that_never_joins_is_named_once(file: str) -> None:
    def work(rank: int, meeting: Meeting) -> object:
        return None if rank == 1 else meeting.settle("resolve", Outcome((rank,)))

    start = time.monotonic()
    errors = [outcome.error for outcome in meet(file, 3, work, timeout=1.0)]
    assert time.monotonic() - start < 6
    assert isinstance(errors[0], RankLostError)
    assert str(errors[0]).startswith("rank 1 of 3 did not join within 1 s")
    assert isinstance(errors[2], PeerError)
    assert errors[2].exit_code == 4


def test_when_rank_0_never_joins_the_next_one_says_so(file: str) -> None:
    def work(rank: int, meeting: Meeting) -> object:
        return None if rank == 0 else meeting.settle("resolve", Outcome((rank,)))

    errors = [outcome.error for outcome in meet(file, 3, work, timeout=0.5)]
    assert str(errors[1]).startswith("rank 0 of 3 did not join")
    assert isinstance(errors[2], PeerError)


def test_a_meeting_point_where_nobody_listens_is_named() -> None:
    world = World(rank=1, size=2, init_method=f"tcp://127.0.0.1:{free_port()}")
    with pytest.raises(RankLostError, match=r"rank 1 cannot reach the meeting point tcp://127\.0\.0\.1"):
        Meeting(world, 1.0)


def test_the_rank_that_keeps_the_store_leaves_last() -> None:
    def work(rank: int, meeting: Meeting) -> float:
        meeting.settle("phase", Outcome((rank,)))
        time.sleep(0.5 * rank)
        meeting.leave()
        return time.monotonic()

    first, second = (outcome.values[0] for outcome in meet(f"tcp://127.0.0.1:{free_port()}", 2, work))
    assert first > second - 0.2


def test_a_rank_that_is_gone_does_not_hold_up_the_store() -> None:
    start = time.monotonic()
    meet(f"tcp://127.0.0.1:{free_port()}", 2, lambda rank, meeting: meeting.leave() if rank == 0 else None)
    assert time.monotonic() - start < 6


def test_ranks_that_resolved_the_same_run_agree() -> None:
    check_digests([{"host": "a", "digest": {"x": "1"}}, {"host": "b", "digest": {"x": "1"}}])


def test_a_difference_is_a_table_of_ranks_and_hosts() -> None:
    notes = [
        {"host": "a", "digest": {"schedule": "1f1b", "same": "1", "code": "0" * 64}},
        {"host": "a", "digest": {"schedule": "1f1b", "same": "1", "code": "f" * 64}},
        {"host": "b", "digest": {"schedule": "mine", "same": "1"}},
    ]
    with pytest.raises(PluginError) as caught:
        check_digests(notes)
    head, *table = str(caught.value).splitlines()
    assert head.startswith("the ranks do not run the same thing: 2 entries differ; install the same versions")
    assert table == [
        "  code: 000000000000 on rank 0 (a), ffffffffffff on rank 1 (a), nothing on rank 2 (b)",
        "  schedule: 1f1b on rank 0 (a), 1 (a), mine on rank 2 (b)",
    ]


def test_an_input_error_keeps_its_words_through_a_meeting(file: str) -> None:
    def work(rank: int, meeting: Meeting) -> object:
        return meeting.settle("resolve", Outcome((), InputError("no", why="because", fix="do")))

    assert str(meet(file, 2, work)[0].error) == "no: because; do"
