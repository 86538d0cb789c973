"""Action lists on cores that ranks share, beside the simulation in which every rank has its own."""

from __future__ import annotations

import pytest

from megatron_run.pipeline.simulate import simulate
from megatron_run_planner.devices import Cores
from megatron_run_planner.schedules import Schedules
from megatron_run_planner.step_time import simulate_shared

COSTS = {"F": 1.0, "B": 2.0, "I": 1.1, "W": 0.9}
FREE = Cores(count=64, slowdown=((1, 1.0),))


@pytest.mark.parametrize(("kind", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_with_enough_cores_each_rank_has_its_own(kind: str, chunks: int) -> None:
    plan = Schedules().plan(kind, 16, 4, chunks, 8)
    costs = [{op: cost * (1 + position / 7) for op, cost in COSTS.items()} for position in range(len(plan.layout))]
    alone = simulate(plan.layout, 8, plan.lists, costs, 0.3).ends
    shared = simulate_shared(plan, costs, 0.3, 1, FREE)
    for one, other in zip(alone, shared, strict=True):
        assert other == pytest.approx(one)


def test_on_one_core_all_work_is_done_one_after_the_other() -> None:
    plan = Schedules().plan("1f1b", 16, 4, 1, 8)
    one = Cores(count=1, slowdown=tuple((busy, float(busy)) for busy in (1, 2, 3, 4)))
    ends = simulate_shared(plan, [COSTS] * 4, 0.0, 1, one)
    assert max(done[-1] for done in ends) == pytest.approx(4 * 8 * 3.0)


def test_ranks_slow_each_other_only_while_they_compute() -> None:
    """One stage of two ranks: at 1.5 times the time. Of two stages only one computes at first."""
    cores = Cores(count=2, slowdown=((1, 1.0), (2, 1.5)))
    pair = Schedules().plan("sequential", 2, 1, 1, 4)
    assert simulate_shared(pair, [COSTS], 0.0, 2, cores)[0][-1] == pytest.approx(4 * 3 * 1.5)
    stages = Schedules().plan("gpipe", 2, 2, 1, 1)
    assert max(done[-1] for done in simulate_shared(stages, [COSTS] * 2, 0.0, 1, cores)) == pytest.approx(6.0)


@pytest.mark.parametrize(("busy", "slower"), [(1, 1.0), (2, 1.2), (3, 1.9), (4, 2.6), (8, 5.2)])
def test_what_was_not_measured_lies_between_or_in_proportion(busy: int, slower: float) -> None:
    assert Cores(count=2, slowdown=((1, 1.0), (2, 1.2), (4, 2.6))).slower(busy) == pytest.approx(slower)


def test_ranks_that_outnumber_the_cores_meet_on_one_of_them() -> None:
    """Two of four ranks compute: the other two left them on one core for a while."""
    cores = Cores(count=2, slowdown=((1, 1.0), (2, 1.2)), crowded=((1, 1.0), (2, 1.6), (4, 2.6)))
    assert [cores.slower(2, ranks) for ranks in (2, 4)] == [1.2, 1.6]
    assert cores.slower(3, 4) == pytest.approx(2.1)
    plan = Schedules().plan("gpipe", 2, 2, 1, 1)
    assert max(done[-1] for done in simulate_shared(plan, [COSTS] * 2, 0.0, 2, cores)) == pytest.approx(6.0 * 1.6)
