import subprocess
import sys
from itertools import pairwise

import pytest

from megatron_run.contracts.schedule import Action, ScheduleSpec
from megatron_run.pipeline.simulate import simulate, timeline, timeline_text
from megatron_run.pipeline.verify import verify
from tests.support.random_schedules import looped_spec, random_plan


def one_forward_one_backward() -> ScheduleSpec:
    return looped_spec(2, 1, 2)


LISTS = [[Action.parse(word) for word in text.split()] for text in ("F0.0 F1.0 B0.0 B1.0", "F0.0 B0.0 F1.0 B1.0")]


def test_bars_start_when_their_input_is_there() -> None:
    drawn = timeline(verify(one_forward_one_backward(), LISTS))
    assert [(str(a), start, end) for a, start, end in drawn.stages[0]] == [
        ("F0.0", 0, 1),
        ("F1.0", 1, 2),
        ("B0.0", 4, 6),
        ("B1.0", 7, 9),
    ]
    assert [(start, end) for _, start, end in drawn.stages[1]] == [(1, 2), (2, 4), (4, 5), (5, 7)]
    assert drawn.makespan == 9
    assert drawn.bubble_fraction == pytest.approx(1 / 3)


def test_costs_can_be_given() -> None:
    drawn = timeline(verify(one_forward_one_backward(), LISTS), {"F": 2.0, "B": 2.0})
    assert drawn.makespan == 12


def test_places_may_take_different_times_and_messages_travel() -> None:
    spec = one_forward_one_backward()
    costs = [{"F": 1.0, "B": 2.0}, {"F": 3.0, "B": 5.0}]
    stage0, stage1 = simulate(spec.layout, 2, verify(spec, LISTS).lists, costs, message=0.5).ends
    # F0 arrives at 1.5: F0.0 1.5-4.5, B0.0 4.5-9.5, then F1.0 and B1.0; each gradient is back half a unit later.
    assert stage1 == (4.5, 9.5, 12.5, 17.5)
    assert stage0 == (1, 2, 12, 20)


@pytest.mark.parametrize("seed", range(30))
def test_no_stage_runs_two_actions_at_once_and_no_time_is_lost(seed: int) -> None:
    drawn = timeline(random_plan(seed))
    ends = {bar.end for bars in drawn.stages for bar in bars} | {0}
    for bars in drawn.stages:
        assert all(before.end <= after.start for before, after in pairwise(bars))
        assert all(bar.start in ends for bar in bars)


def test_the_text_has_one_line_a_stage() -> None:
    lines = timeline_text(timeline(verify(one_forward_one_backward(), LISTS))).splitlines()
    assert lines[:2] == ["stage 0 |01..aa.bb|", "stage 1 |.0aa1bb..|"]
    assert lines[2].startswith("digit: forward")


def test_a_long_step_is_cut_to_its_beginning_and_its_end() -> None:
    lines = timeline_text(timeline(verify(one_forward_one_backward(), LISTS)), width=5).splitlines()
    assert lines[:2] == ["stage 0 |01~bb|", "stage 1 |.0~..|"]
    assert lines[-1] == "~: 5 units of time are left out"


def test_of_many_stages_the_first_and_the_last_are_drawn() -> None:
    spec = looped_spec(30, 1, 1)
    plan = verify(spec, [[Action("F", 0, 0), Action("B", 0, 0)]] * 30)
    lines = timeline_text(timeline(plan), height=4).splitlines()
    assert [line[:8] for line in lines[:5]] == ["stage  0", "stage  1", "... 26 s", "stage 28", "stage 29"]


@pytest.mark.parametrize("seed", range(10))
def test_the_times_of_a_plan_are_those_of_its_timeline(seed: int) -> None:
    plan = random_plan(seed)
    anew = timeline(plan, {**plan.costs, "S": 0.5})  # other costs on paper, the same in effect: nothing is reused
    assert timeline(plan) == anew
    assert all(
        bar.end == end
        for bars, ends in zip(anew.stages, plan.ends, strict=True)
        for bar, end in zip(bars, ends, strict=True)
    )


def test_split_backwards_are_drawn_apart() -> None:
    spec = looped_spec(1, 1, 1)
    text = timeline_text(timeline(verify(spec, [[Action.parse(word) for word in ["F0.0", "R0.0", "I0.0", "W0.0"]]])))
    assert text.splitlines()[0] == "stage 0 |0+aA|"
    assert "weight gradient" in text


def test_planning_never_imports_torch() -> None:
    modules = "plan, verify, lower, simulate, trace_events"
    code = f"import sys; from megatron_run.pipeline import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
