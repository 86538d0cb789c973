from itertools import product

import pytest

from megatron_run.contracts.schedule import ScheduleSpec, signed_order
from megatron_run.pipeline.simulate import timeline
from megatron_run.pipeline.verify import verify
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_zero_bubble import ZeroBubbleH1
from megatron_run_testing import Check
from megatron_run_testing.schedule import schedule_checks
from tests.support.random_schedules import looped_spec

SHAPES = list(product(range(1, 9), (1, 2, 3, 4, 7, 8, 16)))


def warmup(stage: int, spec: ScheduleSpec) -> int:
    return min(spec.stages - stage - 1, spec.microbatches)


def closed_order(stage: int, stages: int, microbatches: int) -> str:
    """I k comes after as many forwards as 1F1B's backward k, and W k after I k + p, or after the last."""
    order = ""
    for k in range(microbatches):
        order += "F" * (min(k + stages - stage, microbatches) - order.count("F"))
        order += "I" + "W" * (k >= stage)
    return order + "W" * (microbatches - order.count("W"))


def test_the_order_equals_its_closed_formula() -> None:
    ranks = 0
    for stages, microbatches in SHAPES:
        for stage, actions in enumerate(ZeroBubbleH1().actions(looped_spec(stages, 1, microbatches))):
            assert "".join(action.op for action in actions) == closed_order(stage, stages, microbatches)
            for op in "FIW":
                assert [a.microbatch for a in actions if a.op == op] == list(range(microbatches))
            ranks += 1
    assert ranks == 252


def test_two_stages_by_hand() -> None:
    first, last = ZeroBubbleH1().actions(looped_spec(2, 1, 3))
    assert " ".join(map(str, first)) == "F0.0 F1.0 I0.0 W0.0 F2.0 I1.0 W1.0 I2.0 W2.0"
    assert " ".join(map(str, last)) == "F0.0 I0.0 F1.0 I1.0 W0.0 F2.0 I2.0 W1.0 W2.0"
    assert signed_order(last) == [1, -1, 1, -1, 1, -1]


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_memory_is_that_of_1f1b(stages: int, microbatches: int) -> None:
    asked = looped_spec(stages, 1, microbatches)
    plan = verify(asked, ZeroBubbleH1().actions(asked))
    assert plan.ascending
    assert plan.peak_in_flight == verify(asked, OneForwardOneBackward().actions(asked)).peak_in_flight
    assert plan.peak_pending_weights == tuple(min(stage + 1, microbatches) for stage in range(stages))
    # From forward to weight gradient: the peak of 1F1B's first stage, on every stage.
    assert plan.peak_held == (min(stages, microbatches),) * stages


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_the_bubble_is_a_third_of_1f1bs(stages: int) -> None:
    for microbatches in (stages, stages + 1, 2 * stages, 4 * stages):
        asked = looped_spec(stages, 1, microbatches)
        zero_bubble, one_forward = (
            timeline(verify(asked, schedule.actions(asked))).makespan - 3 * microbatches
            for schedule in (ZeroBubbleH1(), OneForwardOneBackward())
        )
        assert (zero_bubble, one_forward) == (stages - 1, 3 * (stages - 1))


def over_ideal(asked: ScheduleSpec) -> float | None:
    """Of as many microbatches as stages or more."""
    return (asked.stages - 1) / (3 * asked.microbatches) if asked.microbatches >= asked.stages else None


def test_four_stages_and_eight_microbatches_are_an_eighth_over_the_ideal() -> None:
    assert over_ideal(looped_spec(4, 1, 8)) == 0.125


@pytest.mark.parametrize(
    "check",
    schedule_checks(
        ZeroBubbleH1(),
        warmup=warmup,
        in_flight=lambda stage, asked: warmup(stage, asked) + 1,
        bubble=over_ideal,
        ascending=True,
    ),
    ids=lambda check: check.name,
)
def test_it_conforms(check: Check) -> None:
    check.run()
