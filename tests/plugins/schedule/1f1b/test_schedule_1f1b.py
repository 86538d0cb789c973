from itertools import product

import pytest

from megatron_run.contracts.schedule import ScheduleSpec, signed_order
from megatron_run.errors import ScheduleError
from megatron_run.pipeline.simulate import timeline, timeline_text
from megatron_run.pipeline.verify import verify
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_testing import Check
from megatron_run_testing.schedule import schedule_checks
from tests.support.checkout import ROOT
from tests.support.random_schedules import looped_spec

SHAPES = list(product(range(1, 9), (1, 2, 3, 4, 7, 8, 16)))


def warmup(stage: int, spec: ScheduleSpec) -> int:
    return min(spec.stages - stage - 1, spec.microbatches)


def closed_order(stage: int, stages: int, microbatches: int) -> str:
    """The k-th backward follows the (k + warm-up + 1)-th forward, or the last one."""
    w = min(stages - stage - 1, microbatches)
    order = ""
    for k in range(microbatches):
        while order.count("F") < min(k + w + 1, microbatches):
            order += "F"
        order += "B"
    return order


def test_the_order_equals_its_closed_formula() -> None:
    ranks = 0
    for stages, microbatches in SHAPES:
        for stage, actions in enumerate(OneForwardOneBackward().actions(looped_spec(stages, 1, microbatches))):
            assert "".join(action.op for action in actions) == closed_order(stage, stages, microbatches)
            for op in "FB":
                assert [a.microbatch for a in actions if a.op == op] == list(range(microbatches))
            ranks += 1
    assert ranks == 252


def test_two_stages_by_hand() -> None:
    first, last = OneForwardOneBackward().actions(looped_spec(2, 1, 3))
    assert [str(action) for action in first] == ["F0.0", "F1.0", "B0.0", "F2.0", "B1.0", "B2.0"]
    assert signed_order(last) == [1, -1, 1, -1, 1, -1]


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_memory_and_bubble_equal_the_formulas(stages: int, microbatches: int) -> None:
    asked = looped_spec(stages, 1, microbatches)
    plan = verify(asked, OneForwardOneBackward().actions(asked))
    assert plan.ascending
    assert plan.peak_in_flight == tuple(min(stages - stage, microbatches) for stage in range(stages))
    expected = (stages - 1) / (microbatches + stages - 1)
    assert timeline(plan).bubble_fraction == pytest.approx(expected, abs=1e-12)


def test_chunks_are_refused_with_the_schedule_that_has_them() -> None:
    two_chunks = looped_spec(2, 2, 4)
    with pytest.raises(ScheduleError, match=r"parallel.chunks=2; choose --plugin schedule=interleaved"):
        OneForwardOneBackward().actions(two_chunks)


def test_the_readme_shows_the_real_timeline() -> None:
    asked = looped_spec(4, 1, 8)
    readme = (ROOT / "plugins/schedule/1f1b/README.md").read_text(encoding="utf-8")
    assert timeline_text(timeline(verify(asked, OneForwardOneBackward().actions(asked)))) in readme


def over_ideal(asked: ScheduleSpec) -> float:
    return (asked.stages - 1) / asked.microbatches


def test_four_stages_and_eight_microbatches_are_three_eighths_over_the_ideal() -> None:
    assert over_ideal(looped_spec(4, 1, 8)) == 0.375


@pytest.mark.parametrize(
    "check",
    schedule_checks(
        OneForwardOneBackward(),
        warmup=warmup,
        in_flight=lambda stage, asked: warmup(stage, asked) + 1,
        bubble=over_ideal,
        ascending=True,
    ),
    ids=lambda check: check.name,
)
def test_it_conforms(check: Check) -> None:
    check.run()
