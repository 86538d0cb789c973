"""Both variants: options, suggestions, refusals, the planned bubble, the README."""

import pytest
from pydantic import ValidationError

from megatron_run.contracts import Schedule
from megatron_run.contracts.schedule import LayoutSpec, ScheduleSpec
from megatron_run.errors import ScheduleError
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.simulate import timeline, timeline_text
from megatron_run.pipeline.verify import verify
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_zero_bubble import Options, ZeroBubbleH1, ZeroBubbleV, megatron_run_create_schedule
from tests.support.checkout import ROOT
from tests.support.resolving import mistake, resolved


def planned(schedule: Schedule, stages: int, chunks: int, microbatches: int) -> Plan:
    layout = schedule.layout(LayoutSpec(stages, chunks, stages * chunks))
    spec = ScheduleSpec(layout, stages, chunks, microbatches)
    return verify(spec, schedule.actions(spec))


@pytest.mark.parametrize(
    ("schedule", "chunks", "over_ideal"),
    [(OneForwardOneBackward(), 1, 0.375), (ZeroBubbleH1(), 1, 0.125), (ZeroBubbleV(), 2, 0.0625)],
    ids=["1f1b", "h1", "v"],
)
def test_four_stages_and_eight_microbatches_are_this_much_over_the_ideal(
    schedule: Schedule, chunks: int, over_ideal: float
) -> None:
    ideal = 3 * 8 * chunks  # a forward, an input gradient and a weight gradient of every chunk
    makespan = timeline(planned(schedule, 4, chunks, 8)).makespan
    assert makespan / ideal - 1 == pytest.approx(over_ideal, abs=1e-12)


def test_the_option_chooses_the_variant() -> None:
    assert isinstance(megatron_run_create_schedule(Options()), ZeroBubbleH1)
    assert isinstance(megatron_run_create_schedule(Options(variant="v")), ZeroBubbleV)
    with pytest.raises(ValidationError):
        Options.model_validate({"variant": "h2"})


def test_each_variant_suggests_what_it_runs_on() -> None:
    run = resolved(plugins=["schedule=zero-bubble"])
    assert (run.sizes.pipeline, run.config.parallel.chunks) == (2, 1)
    assert run.notices == ("schedule=zero-bubble suggests parallel.pipeline=2",)
    run = resolved(plugins=["schedule=zero-bubble,variant=v"])
    assert (run.sizes.pipeline, run.config.parallel.chunks) == (2, 2)
    assert run.notices == ("schedule=zero-bubble suggests parallel.pipeline=2, parallel.chunks=2",)
    assert [(place.stage, list(place.layers)) for place in run.layout] == [(0, [0]), (1, [1]), (1, [2]), (0, [3])]


@pytest.mark.parametrize(
    ("schedule", "chunks", "message"),
    [
        (ZeroBubbleH1(), 2, r"h1 runs one chunk a stage, got parallel.chunks=2; set parallel.chunks=1, or .*variant=v"),
        (ZeroBubbleV(), 1, r"v runs two chunks a stage, got parallel.chunks=1; set parallel.chunks=2, or .*variant=h1"),
        (ZeroBubbleV(), 3, r"v runs two chunks a stage, got parallel.chunks=3; set parallel.chunks=2, or .*variant=h1"),
    ],
)
def test_another_number_of_chunks_is_refused_by_layout_and_actions(
    schedule: Schedule, chunks: int, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        schedule.layout(LayoutSpec(2, chunks, 4 * chunks))
    with pytest.raises(ScheduleError, match=message):
        schedule.actions(ScheduleSpec((), 2, chunks, 4))


def test_a_refusal_reaches_the_user_as_a_mistake_of_the_configuration() -> None:
    line, code = mistake(plugins=["schedule=zero-bubble,variant=v"], sets=["parallel.chunks=1"])
    assert line.startswith("zero-bubble variant v runs two chunks a stage, got parallel.chunks=1")
    assert line.endswith("set parallel.chunks=2, or choose schedule.variant=h1 with parallel.chunks=1")
    assert code == 2


@pytest.mark.parametrize(("schedule", "chunks"), [(ZeroBubbleH1(), 1), (ZeroBubbleV(), 2)], ids=["h1", "v"])
def test_the_readme_shows_the_real_timeline(schedule: Schedule, chunks: int) -> None:
    readme = (ROOT / "plugins/schedule/zero-bubble/README.md").read_text(encoding="utf-8")
    assert timeline_text(timeline(planned(schedule, 4, chunks, 8))) in readme
