"""Who holds up whom: the pages of a few ranks in, one name or none out."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, product
from unittest import mock

import pytest

from megatron_run.errors import ExitCode
from megatron_run_engine.launch.watchdog.page import Entered, Page
from megatron_run_engine.launch.watchdog.verdict import BEGINNING, RankState, _WaitGraph, judge

LIMIT = 10.0
ALL = range(4)
SUM = "all-reduce"


def page(phase: str = "backward", **known: object) -> Page:
    return Page(**{"changes": 9, "process": 1, "step": 3, "detail": "B0.0", "phase": phase, **known})  # type: ignore[arg-type]


def computing(quiet: float, **counts: int) -> RankState:
    """A rank at work, that has entered so many collectives of each scope."""
    return RankState(page(entered=entered(counts)), quiet)


def within(scope: str, number: int, quiet: float, *, does: str = SUM, of: int = 8, **counts: int) -> RankState:
    """A rank inside a collective over all four."""
    last = entered({**counts, scope: number}) | {scope: Entered(number, of, does)}
    return RankState(page("optimizer", detail="", inside=(scope, number), entered=last, members={scope: ALL}), quiet)


def entered(counts: Mapping[str, int]) -> dict[str, Entered]:
    return {scope: Entered(number, 8, SUM) for scope, number in counts.items()}


def receiving(peer: int, quiet: float, phase: str = "receive") -> RankState:
    return RankState(page(phase, detail="the activation of microbatch 0", peer=peer), quiet)


def named(*ranks: RankState) -> int | None:
    error = judge(ranks, LIMIT)
    return None if error is None else error.rank


def told(*ranks: RankState) -> str:
    error = judge(ranks, LIMIT)
    assert error is not None
    assert error.exit_code == ExitCode.RANK_LOST
    text = str(error)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("guilty", ALL)
def test_the_rank_that_did_not_enter_what_the_others_are_in_is_named(guilty: int) -> None:
    ranks = [within("world", 7, LIMIT) for _ in ALL]
    ranks[guilty] = computing(LIMIT + 0.5, world=6)
    witness = 1 if guilty == 0 else 0
    assert told(*ranks) == (
        f"rank {guilty} hangs: nothing new for 10.5 s in backward B0.0 of step 3, rank {witness} and 2 more wait for it"
        " in all-reduce of 8 values, number 7 over world, in optimizer of step 3;"
        " see the log of that rank, or raise run.timeout if it is only slow"
    )
    assert named(*ranks) == guilty


@pytest.mark.parametrize("quiet", [0.0, 5.0, LIMIT - 0.1])
def test_who_waits_for_a_rank_that_is_only_slow_is_no_alarm_however_long_it_waits(quiet: float) -> None:
    waiting = within("world", 7, 3 * LIMIT)
    assert named(waiting, computing(quiet, world=6), waiting, waiting) is None
    assert named(receiving(1, 3 * LIMIT), computing(quiet)) is None


def test_nothing_is_wrong_before_the_limit_even_if_all_stand_still() -> None:
    assert named(*[computing(LIMIT - 0.01) for _ in ALL]) is None
    assert named() is None


def test_a_rank_alone_is_named_by_its_own_silence() -> None:
    assert told(computing(LIMIT)).startswith("rank 0 hangs: nothing new for 10.0 s in backward B0.0 of step 3; see")


@pytest.mark.parametrize("chain", [(1, 2, 3), (2, 3, 1), (3, 1, 2)])
def test_a_chain_of_messages_leads_to_its_end(chain: tuple[int, ...]) -> None:
    """Rank 0 waits for the first of the chain, that one for the second, and the last one computes."""
    ranks = {0: receiving(chain[0], LIMIT), chain[-1]: computing(LIMIT)}
    for here, there in pairwise(chain):
        ranks[here] = receiving(there, LIMIT, phase="send")
    assert named(*(ranks[rank] for rank in ALL)) == chain[-1]


def test_a_chain_through_collectives_and_messages_leads_to_its_end() -> None:
    """0 waits in a collective for 1 to 3; 1 for a message of 2; 2 in another collective for 3."""
    waiting = within("tensor", 4, LIMIT, world=6)
    assert named(within("world", 7, LIMIT), receiving(2, LIMIT), waiting, computing(LIMIT, world=6, tensor=3)) == 3


def test_while_the_end_of_a_chain_goes_on_nobody_is_named() -> None:
    for slow in (computing(1.0), receiving(0, 1.0), within("world", 1, 1.0)):
        assert named(receiving(1, LIMIT), receiving(2, LIMIT), slow) is None


def test_one_that_hangs_is_named_while_another_that_is_waited_for_goes_on() -> None:
    waiting = within("world", 7, LIMIT)
    assert named(waiting, computing(1.0, world=6), computing(LIMIT, world=6), waiting) == 2


def test_of_several_that_hang_the_one_silent_for_longest_is_named() -> None:
    for first, second in ((1, 2), (2, 1)):
        ranks = [within("world", 7, LIMIT) for _ in ALL]
        ranks[first], ranks[second] = computing(LIMIT + 2, world=6), computing(LIMIT + 1, world=6)
        assert named(*ranks) == first


@pytest.mark.parametrize("state", ["computing", "waiting", "entered"])
def test_a_stopped_rank_is_named_whatever_it_was_doing(state: str) -> None:
    """``entered``: in the very collective in which the others wait, and which it can no more take part in."""
    was = {"computing": computing(0, world=6), "waiting": receiving(0, 0), "entered": within("world", 7, 0)}[state]
    ranks = [within("world", 7, LIMIT) for _ in ALL]
    ranks[2] = RankState(was.page, LIMIT, stopped=LIMIT)
    assert told(*ranks).startswith("rank 2 is stopped by a signal (SIGSTOP): nothing new for 10.0 s in ")
    assert named(*ranks) == 2


def test_whoever_is_stopped_in_a_collective_that_it_entered_last_is_waited_for() -> None:
    waiting = within("world", 7, LIMIT)
    assert named(waiting, RankState(within("world", 7, 0).page, LIMIT - 1, stopped=1.0), waiting, waiting) is None
    assert named(waiting, RankState(within("world", 7, 0).page, LIMIT, stopped=2.0), waiting, waiting) == 1


def test_a_rank_that_does_nothing_with_others_is_named_before_those_in_a_collective_that_all_have_entered() -> None:
    entered_by_all = within("tensor", 4, LIMIT + 1)
    assert named(entered_by_all, entered_by_all, computing(LIMIT, tensor=4), entered_by_all) == 2


def test_a_rank_that_was_stopped_for_a_moment_while_it_waited_long_is_no_alarm() -> None:
    waiting = RankState(within("world", 7, 0).page, 3 * LIMIT, stopped=0.5)
    assert named(waiting, computing(1.0, world=6)) is None


@pytest.mark.parametrize(("odd", "does", "of"), [(0, "broadcast", 8), (3, SUM, 9)])
def test_a_collective_that_one_rank_enters_as_another_names_that_rank_and_both(odd: int, does: str, of: int) -> None:
    ranks = [within("data", 5, LIMIT) for _ in ALL]
    ranks[odd] = within("data", 5, LIMIT, does=does, of=of)
    text = told(*ranks)
    assert text.startswith(f"rank {odd} entered another collective than the others: number 5 over data is ")
    assert f"{does} of {of} values on rank {odd}" in text
    assert "all-reduce of 8 values on rank 0, 1, 2" in text or odd == 0
    assert named(*ranks) == odd


def test_a_skipped_collective_shows_as_a_number_that_stays_behind() -> None:
    """Rank 2 left out one of four: it has ended its step, and the others are still in the last one."""
    ranks = [within("world", 4, LIMIT) for _ in ALL]
    ranks[2] = RankState(page("observe", detail="", entered=entered({"world": 3})), LIMIT)
    assert named(*ranks) == 2


def test_collectives_in_another_order_are_a_circle() -> None:
    first = within("data", 5, LIMIT, tie=2)
    other = within("tie", 3, LIMIT, data=4)
    text = told(first, other)
    assert text.startswith("ranks 0, 1 wait for each other: rank 0 is in all-reduce of 8 values, number 5 over data")
    assert "rank 1 is in all-reduce of 8 values, number 3 over tie" in text
    assert "same order" in text


def test_who_only_waits_for_a_circle_is_not_in_it() -> None:
    assert told(receiving(1, LIMIT), receiving(2, LIMIT), receiving(1, LIMIT)).startswith("ranks 1, 2 wait for each")


def test_a_collective_that_all_have_entered_and_that_does_not_end_names_a_rank_in_it() -> None:
    assert "all-reduce of 8 values, number 7 over world" in told(*[within("world", 7, LIMIT) for _ in ALL])


def test_a_rank_that_has_not_begun_is_named_by_those_that_wait_for_all_to_begin() -> None:
    starting = RankState(page("start", detail="process groups"), BEGINNING)
    assert told(starting, RankState(None, BEGINNING)).startswith(
        "rank 1 does not begin: it has said nothing yet, rank 0"
    )
    assert named(RankState(None, BEGINNING), RankState(None, BEGINNING)) is None  # the rendezvous names them


def test_a_rank_of_which_nothing_is_known_yet_is_not_blamed() -> None:
    assert named(within("world", 7, 2 * LIMIT), RankState(None, 1.0)) is None


def test_a_rank_has_longer_until_its_first_step() -> None:
    assert named(RankState(page("start"), BEGINNING - 1)) is None
    assert named(RankState(page("start"), BEGINNING)) == 0
    assert judge([RankState(page("start"), BEGINNING)], 10 * BEGINNING) is None


def test_a_rank_that_has_ended_is_only_named_when_it_is_waited_for() -> None:
    over = RankState(page("end", detail=""), 5 * LIMIT, ended=True)
    assert named(over, computing(1.0)) is None
    for ended in (over, RankState(None, ended=True)):
        assert told(ended, receiving(0, LIMIT)).startswith("rank 0 has ended without the others")


def test_a_rank_that_hangs_in_its_end_is_named() -> None:
    assert "in end of step 3" in told(RankState(page("end", detail=""), LIMIT), RankState(page("end"), 0, ended=True))


@pytest.mark.parametrize("guilty", ALL)
def test_where_a_gpu_waits_the_rank_that_has_entered_least_is_named(guilty: int) -> None:
    """All hosts wait for their devices; only what they have launched tells them apart."""

    def host(number: int) -> RankState:
        known = {"entered": entered({"world": number}), "members": {"world": ALL}, "ahead": True}
        return RankState(page("optimizer", detail="", **known), LIMIT)

    assert named(*(host(6 if rank == guilty else 7) for rank in ALL)) == guilty


def test_every_state_of_three_ranks_ends_in_a_name_or_in_patience() -> None:
    """Whatever they do: without a silent rank nobody is named, and no name is that of a rank that goes on."""
    for quiet in product((0.0, LIMIT), repeat=3):
        states = [
            [computing(q, world=1), within("world", 2, q, world=2), receiving(0, q), receiving(1, q), receiving(2, q)]
            for q in quiet
        ]
        for ranks in product(*states):
            found = named(*ranks)
            assert found is None or quiet[found] >= LIMIT
            if max(quiet) < LIMIT:
                assert found is None
            if min(quiet) >= LIMIT:
                assert found is not None


@pytest.mark.parametrize("late", [[5], [*range(500)]], ids=["one", "many"])
def test_of_a_thousand_ranks_each_is_looked_at_a_few_times(late: list[int]) -> None:
    """And not once for each that waits: a hub of thousands would be busy for minutes."""
    size, looks = 1000, 0
    look = _WaitGraph._entered

    def counted(waits: _WaitGraph, rank: int, scope: str) -> Entered:
        nonlocal looks
        looks += 1
        return look(waits, rank, scope)

    waiting = page(inside=("world", 7), entered=entered({"world": 7}), members={"world": range(size)})
    ranks = [RankState(waiting, LIMIT)] * size
    for each in late:
        ranks[each] = computing(LIMIT + 0.5, world=6)
    with mock.patch.object(_WaitGraph, "_entered", counted):
        assert named(*ranks) == late[0]
    assert looks < 4 * size
