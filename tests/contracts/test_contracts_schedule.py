"""The suite of kind schedule fails what it should, and says where."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from megatron_run.contracts import Schedule
from megatron_run.contracts.schedule import ScheduleSpec
from megatron_run.pipeline.lower import Instruction, lower
from megatron_run.pipeline.plan import Plan
from megatron_run_testing import CheckFailed
from megatron_run_testing.schedule import schedule_checks
from tests.contracts.broken_schedules import (
    BackwardFirst,
    BarePlaces,
    ChangesCosts,
    ChunkFromOne,
    Crashing,
    Crossing,
    Descending,
    DropsALayer,
    Forgetful,
    Greedy,
    IgnoresCounts,
    LacksAPlace,
    Lazy,
    NeedsEveryCost,
    OneStageShort,
    Pipelined,
    PutsTwoInOnePlace,
    RefusesCosts,
    RefusesCounts,
    RefusesTheSecondTime,
    Remembering,
    Repeating,
    RepeatsALayer,
    ReturnsNothing,
    Silent,
    SkipsTheCheap,
    Stuck,
    TurnsWithLayers,
    TurnsWithMicrobatches,
    WeightsLast,
    WeightsLate,
    Yielding,
    closed_warmup,
)


def closed_in_flight(stage: int, spec: ScheduleSpec) -> int:
    return min(spec.stages - stage, spec.microbatches)


def closed_bubble(spec: ScheduleSpec) -> float:
    return (spec.stages - 1) / spec.microbatches


PROMISES: dict[str, Any] = {
    "warmup": closed_warmup,
    "in_flight": closed_in_flight,
    "bubble": closed_bubble,
    "ascending": True,
}


def failures(schedule: Callable[[], Schedule], **promises: Any) -> dict[str, str]:
    """What each check that fails says, by its name; every check gets a schedule of its own."""
    found = {}
    for index, check in enumerate(schedule_checks(schedule(), **promises)):
        try:
            schedule_checks(schedule(), **promises)[index].run()
        except CheckFailed as failure:
            found[check.name] = str(failure)
    return found


def test_a_good_schedule_passes_every_check() -> None:
    assert len(schedule_checks(Pipelined(), **PROMISES)) == 12
    assert failures(Pipelined, **PROMISES) == {}


def test_what_needs_legal_plans_is_not_tried_where_one_is_illegal() -> None:
    states = {}
    for check in schedule_checks(Stuck(), **PROMISES):
        with suppress(CheckFailed):
            states[check.name] = check.run()
    assert "the action lists are a legal plan" not in states, "it failed"
    assert [name for name, state in states.items() if state == "P=2 V=1 M=2 has no legal plan"] == [
        "the action lists are legal at other costs",
        "messages neither deadlock nor swap",
        "activations in flight keep their bound",
        "the bubble equals its formula",
        "gradients add up in microbatch order",
    ]


@pytest.mark.parametrize(
    ("schedule", "name", "message"),
    [
        (
            Forgetful,
            "the action lists are a legal plan",
            "P=2 V=1 M=1: stage 1: B0.0 is missing: its forward has no backward (B, or I and then W)",
        ),
        (
            Repeating,
            "the action lists are a legal plan",
            "P=2 V=1 M=1: stage 1, action 2: F0.0 is repeated: it already stands at action 0",
        ),
        (
            BackwardFirst,
            "the action lists are a legal plan",
            (
                "P=1 V=1 M=1: stage 0, action 0: B0.0 is too early: it needs F0.0 before it, which stands later, at "
                "action 1"
            ),
        ),
        (
            Stuck,
            "the action lists are a legal plan",
            (
                "P=2 V=1 M=2: the schedule deadlocks: stage 0, action 1: B0.0 waits for B0.0 of stage 1 (action 2, "
                "behind F1.0); stage 1, action 1: F1.0 waits for F1.0 of stage 0 (action 2, behind B0.0)"
            ),
        ),
        (
            OneStageShort,
            "the action lists are a legal plan",
            "P=1 V=1 M=1: the schedule gave 0 action lists: the pipeline has 1 stage",
        ),
        (
            ChunkFromOne,
            "the action lists are a legal plan",
            (
                "P=1 V=1 M=1: stage 0, action 0: F0.1 is out of range: the stage has 1 chunk and the step 1 "
                "microbatch, counted from 0"
            ),
        ),
        (
            Crashing,
            "it accepts a shape",
            "P=1 V=1 M=1: actions raised IndexError('list index out of range'); refuse a shape with ScheduleError",
        ),
        (
            ReturnsNothing,
            "it accepts a shape",
            "P=1 V=1 M=1: actions returned None; it must return a list of actions for each stage",
        ),
        (Silent, "it accepts a shape", "it refuses all 72 shapes, from P=1 V=1 M=1 to P=4 V=3 M=8"),
        (
            Silent,
            "a refusal contains a fix",
            "P=1 V=1 M=1: the refusal 'no' has no fix that says what to do",
        ),
        (
            RefusesCounts,
            "a refusal contains a fix",
            "P=1 V=1 M=1: the refusal 'uneven' has no fix that says what to do",
        ),
        (
            DropsALayer,
            "the layout holds every layer once",
            "P=1 V=1 M=1: the layout ends after 1 layer: layers 0 to 1 must have a place",
        ),
        (
            RepeatsALayer,
            "the layout holds every layer once",
            (
                "P=1 V=2 M=1: place 1 of the layout (stage 0, chunk 1) holds the layers [0, 1, 2, 3]: layer 2 comes "
                "next: a layout holds each layer once, in model order"
            ),
        ),
        (
            IgnoresCounts,
            "the layout holds every layer once",
            "P=1 V=2 M=1: place 0 of the layout (stage 0, chunk 0) holds 2 layers: the user asked for 1",
        ),
        (
            LacksAPlace,
            "the layout holds every layer once",
            (
                "P=1 V=2 M=1: the layout has no place for stage 0, chunk 1: each chunk of 1 stage x 2 chunks must "
                "have exactly one place"
            ),
        ),
        (
            PutsTwoInOnePlace,
            "the layout holds every layer once",
            (
                "P=2 V=1 M=1: place 1 of the layout (stage 0, chunk 0) is repeated: each chunk of 2 stages x 1 chunk "
                "must have exactly one place"
            ),
        ),
        (
            BarePlaces,
            "the layout holds every layer once",
            "P=1 V=1 M=1: place 0 of the layout is (0, 0, range(0, 2)); write Place(stage, chunk, layers)",
        ),
        (
            TurnsWithLayers,
            "places do not depend on layers or microbatches",
            (
                "P=2 V=1 M=1: place 0 of the layout (stage 1, chunk 0) is stage 0, chunk 0 when the number of layers "
                "changes: a place's stage and chunk follow from the stages and chunks of the layout alone"
            ),
        ),
        (
            TurnsWithMicrobatches,
            "places do not depend on layers or microbatches",
            "P=2 V=1 M=2: after its actions the layout is another than after those of P=2 V=1 M=1",
        ),
        (
            NeedsEveryCost,
            "the action lists are legal at other costs",
            "P=1 V=1 M=1: actions raised KeyError('W'); refuse a shape with ScheduleError",
        ),
        (
            ChangesCosts,
            "the action lists are a legal plan",
            (
                "P=1 V=1 M=1: actions raised TypeError(\"'mappingproxy' object does not support item assignment\"); "
                "refuse a shape with ScheduleError"
            ),
        ),
        (
            SkipsTheCheap,
            "the action lists are legal at other costs",
            (
                "P=1 V=1 M=1 at costs F 1, B 3, I 1.5, W 1.5: stage 0: B0.0 is missing: its forward has no backward "
                "(B, or I and then W)"
            ),
        ),
        (
            RefusesCosts,
            "the action lists are legal at other costs",
            (
                "P=1 V=1 M=1 at costs F 1, B 3, I 1.5, W 1.5: refused, and served at the default costs: backwards cost "
                "two; set their cost to 2"
            ),
        ),
        (
            Remembering,
            "equal calls give equal answers",
            (
                "P=1 V=1 M=8 stage 0, action 7: two calls gave two action lists, with B0.0 and with F7.0; a list "
                "follows from its spec alone"
            ),
        ),
        (
            RefusesTheSecondTime,
            "equal calls give equal answers",
            "P=1 V=1 M=1: one call was refused, another was not; both follow from the spec alone",
        ),
    ],
)
def test_a_broken_contract_is_named(schedule: Callable[[], Schedule], name: str, message: str) -> None:
    assert failures(schedule)[name] == message


def test_a_list_that_can_be_read_only_once_is_refused() -> None:
    message = failures(Yielding)["it accepts a shape"]
    assert message.startswith("P=1 V=1 M=1 stage 0: actions returned <list_iterator ")
    assert message.endswith("; it must return a list")


@pytest.mark.parametrize(
    ("schedule", "promise", "name", "message"),
    [
        (
            Greedy,
            "warmup",
            "the warm-up equals its formula",
            "P=1 V=1 M=2 stage 0: 2 forwards before the first backward, expected 1 for a warm-up of 0",
        ),
        (
            Greedy,
            "in_flight",
            "activations in flight keep their bound",
            "P=1 V=1 M=2 stage 0: 2 chunk-microbatches in flight, at most 1 promised",
        ),
        (
            Lazy,
            "bubble",
            "the bubble equals its formula",
            "P=2 V=1 M=2: a step takes 12 forwards of a chunk, 1 over the ideal 6; 0.5 promised",
        ),
        (
            Descending,
            "ascending",
            "gradients add up in microbatch order",
            "P=1 V=1 M=2 stage 0, action 3: B0.0 comes after B1.0, and microbatch order is promised",
        ),
    ],
)
def test_a_broken_promise_is_named(schedule: Callable[[], Schedule], promise: str, name: str, message: str) -> None:
    assert failures(schedule) == {}, "without the promise nothing is wrong with it"
    assert failures(schedule, **{promise: PROMISES[promise]}) == {name: message}


def test_a_bubble_may_be_promised_for_some_shapes_only() -> None:
    assert failures(Lazy, bubble=lambda spec: None if spec.stages > 1 else 0.0) == {}


def test_a_split_backward_ascends_in_both_halves() -> None:
    assert "gradients add up in microbatch order" not in failures(WeightsLate, ascending=True)
    assert failures(WeightsLast, ascending=True)["gradients add up in microbatch order"] == (
        "P=1 V=1 M=2 stage 0, action 5: W0.0 comes after W1.0, and microbatch order is promised"
    )


def test_messages_that_a_lowering_swaps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No schedule can do it: receives that are posted in the order of use, as a wrong lowering would."""

    def in_order_of_use(plan: Plan, stage: int, lookahead: int | None = 1) -> tuple[Instruction, ...]:
        program = lower(plan, stage, lookahead)
        return tuple(step._replace(post=(step.receive,) if step.receive else ()) for step in program)

    def without_receives(plan: Plan, stage: int, lookahead: int | None = 1) -> tuple[Instruction, ...]:
        return tuple(step._replace(post=()) for step in lower(plan, stage, lookahead))

    name = "messages neither deadlock nor swap"
    monkeypatch.setattr("megatron_run_testing.schedule.lower", in_order_of_use)
    assert failures(Crossing)[name] == (
        "P=2 V=1 M=2: the activation of microbatch 0 from stage 0 to stage 1 arrived where the activation of "
        "microbatch 1 from stage 0 to stage 1 was expected"
    )
    monkeypatch.setattr("megatron_run_testing.schedule.lower", without_receives)
    assert failures(Pipelined)[name] == (
        "P=2 V=1 M=1: stage 0 waits at B0.0 for the gradient of microbatch 0 from stage 1 to stage 0; "
        "stage 1 waits at F0.0 for the activation of microbatch 0 from stage 0 to stage 1"
    )
