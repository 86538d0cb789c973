from __future__ import annotations

import json
from itertools import pairwise

import pytest

from megatron_run.contracts.observer import Bar
from megatron_run.contracts.schedule import Action, Place
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.simulate import timeline
from megatron_run.pipeline.trace_events import Event, trace_document, trace_events
from tests.support.drawn_plans import interleaved_plan, one_forward_one_backward_plan
from tests.support.random_schedules import random_plan

PLANS = [interleaved_plan(), one_forward_one_backward_plan(), *map(random_plan, range(20))]


def events(plan: Plan) -> list[Event]:
    document = trace_document(list(trace_events(timeline(plan).stages, plan.layout, title="mine")))
    made: list[Event] = json.loads(json.dumps(document))["traceEvents"]
    return made


def of(found: list[Event], phase: str, name: str = "") -> list[Event]:
    return [each for each in found if each["ph"] == phase and each["name"].startswith(name)]


@pytest.mark.parametrize("plan", PLANS)
def test_each_stage_is_a_named_track_with_its_actions(plan: Plan) -> None:
    found = events(plan)
    tracks = {each["tid"]: each["args"]["name"] for each in of(found, "M", "thread_name")}
    assert tracks == {stage + 1: f"stage {stage}" for stage in range(plan.stages)}
    for stage, actions in enumerate(plan.lists):
        slices = [each for each in of(found, "X") if each["tid"] == stage + 1]
        assert [each["name"] for each in slices] == [str(action) for action in actions]
        assert [each["ts"] + each["dur"] for each in slices] == [end * 1000 for end in plan.ends[stage]]


@pytest.mark.parametrize("plan", PLANS)
def test_each_message_is_one_arrow_from_its_sender_to_its_user(plan: Plan) -> None:
    found = events(plan)
    starts, ends = ({each["id"]: each for each in of(found, phase)} for phase in "sf")
    hops = sum(a.stage != b.stage for a, b in zip(plan.layout, plan.layout[1:], strict=False))
    assert len(of(found, "s")) == len(of(found, "f")) == len(starts) == 2 * hops * plan.microbatches
    assert starts.keys() == ends.keys()
    for name, start in starts.items():
        sender, user = slice_around(found, start), slice_around(found, ends[name])
        assert start["tid"] != ends[name]["tid"]
        assert start["ts"] < ends[name]["ts"]
        assert sender["args"]["microbatch"] == user["args"]["microbatch"]
        assert (sender["name"][0] == "F") == (user["name"][0] == "F") == (start["name"] == "activation")


def slice_around(found: list[Event], point: Event) -> Event:
    """The one action during which ``point`` happens."""
    (around,) = (
        each
        for each in of(found, "X")
        if each["tid"] == point["tid"] and each["ts"] <= point["ts"] < each["ts"] + each["dur"]
    )
    return around


@pytest.mark.parametrize("plan", PLANS)
def test_the_counters_reach_the_peaks_and_return_to_nothing(plan: Plan) -> None:
    for stage, peak in enumerate(plan.peak_in_flight):
        counted = [
            each["args"]["activations"] for each in of(events(plan), "C") if each["name"].endswith(f"stage {stage}")
        ]
        assert max(counted) == peak
        assert counted[-1] == 0


def test_two_steps_share_a_file() -> None:
    plan = one_forward_one_backward_plan(2, 2)
    stages = timeline(plan).stages
    both = [event for process in (0, 1) for event in trace_events(stages, plan.layout, process=process, title="a")]
    assert {each["pid"] for each in both} == {0, 1}
    assert len({each["id"] for each in both if each["ph"] == "s"}) == len(of(both, "s"))


def test_a_viewer_that_counts_nanoseconds_finds_no_overlap_and_every_arrow() -> None:
    """Moments of which no decimal fraction is exact, as clocks give them; numbers are all that Perfetto joins by."""
    bars = [Bar(Action("F", number, 0), number / 7e6, (number + 1) / 7e6) for number in range(200)]
    found = list(trace_events([bars], (Place(0, 0, range(1)),), title="mine", unit=1e6))
    slices = [(each["ts"] * 1000, each["dur"] * 1000) for each in of(found, "X")]
    assert all(moment == int(moment) for both in slices for moment in both)
    assert all(a + length <= b for (a, length), (b, _) in pairwise(slices))
    plan = one_forward_one_backward_plan()
    assert all(isinstance(each["id"], int) for each in events(plan) if each["ph"] in "sf")
