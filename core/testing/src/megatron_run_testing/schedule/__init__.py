"""The conformance suite of kind ``schedule``, over a grid of shapes. It needs neither torch nor processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile, zip_longest

from megatron_run.contracts import LayoutSpec, Place, Schedule, ScheduleSpec
from megatron_run.errors import ScheduleError
from megatron_run.pipeline.lower import lower
from megatron_run.pipeline.simulate import timeline
from megatron_run.pipeline.verify import check_layout, check_same_places, first_descent, verify
from megatron_run_testing import Check, CheckFailed
from megatron_run_testing.schedule.answers import (
    SHAPES,
    Answer,
    NothingToTryError,
    Shape,
    accepted,
    answers,
    ask_layout,
    even_layout,
    plans,
)
from megatron_run_testing.schedule.ordered_channels import (
    SwappedMessageError,
    TransportDeadlockError,
    carry_out,
    per_channel,
    per_stage,
)

__all__ = ["SHAPES", "BubbleFormula", "Formula", "Shape", "schedule_checks"]

#: A schedule's closed formula for a number per stage: called with the stage and the spec.
Formula = Callable[[int, ScheduleSpec], int]

#: A schedule's closed formula for the time of a step over the ideal (0.375 is 37.5 % longer); None: no promise.
BubbleFormula = Callable[[ScheduleSpec], float | None]

#: Further costs for which lists must be legal; an absent operation is free.
_OTHER_COSTS: tuple[Mapping[str, float], ...] = ({"F": 1, "B": 3, "I": 1.5, "W": 1.5}, {"F": 5, "B": 1, "I": 1})

#: A check over a grid of shapes; it may return why there was nothing to try.
_Trial = Callable[[Schedule, Sequence[Shape]], str | None]

#: Largest number of microbatches of a step whose messages are simulated.
_CARRIED = 4


def schedule_checks(
    schedule: Schedule,
    shapes: Sequence[Shape] = SHAPES,
    *,
    warmup: Formula | None = None,
    in_flight: Formula | None = None,
    bubble: BubbleFormula | None = None,
    ascending: bool = False,
) -> tuple[Check, ...]:
    """The checks that every schedule must pass, and checks of further promises of this one.

    - ``warmup``: a closed formula for the number of forwards before the steady phase, which begins with a forward. The
      lists must begin with ``min(warmup + 1, M*V)`` forwards.
    - ``in_flight``: a bound on the (microbatch, chunk) pairs that each stage holds. The verifier's peak must not exceed
      it.
    - ``bubble``: a formula for the time of a step over the ideal, which is the work of the busiest stage. The simulated
      timeline must agree.
    - ``ascending``: each chunk accumulates its gradients in microbatch order, so that they equal those of sequential
      bit for bit.
    """
    checks: dict[str, _Trial] = {
        "it accepts a shape": _accepts_a_shape,
        "a refusal contains a fix": _refusals_teach,
        "the layout holds every layer once": _layouts_are_whole,
        "places do not depend on layers or microbatches": _places_stay,
        "the action lists are a legal plan": _lists_verify,
        "the action lists are legal at other costs": _other_costs_verify,
        "equal calls give equal answers": _is_pure,
        "messages neither deadlock nor swap": _messages_arrive,
    }
    if warmup:
        checks["the warm-up equals its formula"] = partial(_warmup_equals, formula=warmup)
    if in_flight:
        checks["activations in flight keep their bound"] = partial(_in_flight_keeps, formula=in_flight)
    if bubble:
        checks["the bubble equals its formula"] = partial(_bubble_equals, formula=bubble)
    if ascending:
        checks["gradients add up in microbatch order"] = _is_ascending
    refused_too, grid = (_accepts_a_shape, _refusals_teach, _layouts_are_whole, _is_pure), tuple(shapes)
    return tuple(
        Check(name, partial(check if check in refused_too else _where_accepted(check), schedule, grid))
        for name, check in checks.items()
    )


def _where_accepted(check: _Trial) -> _Trial:
    """``check``, which has nothing to try if the schedule accepts no shape, or if a plan that it needs is illegal."""

    def tried(schedule: Schedule, shapes: Sequence[Shape]) -> str | None:
        try:
            return check(schedule, shapes) if any(accepted(schedule, shapes)) else "it accepts no shape"
        except NothingToTryError as reason:
            return str(reason)

    return tried


def _accepts_a_shape(schedule: Schedule, shapes: Sequence[Shape]) -> None:
    if not any(accepted(schedule, shapes)):
        raise CheckFailed(f"it refuses all {len(shapes)} shapes, from {shapes[0]} to {shapes[-1]}")


def _refusals_teach(schedule: Schedule, shapes: Sequence[Shape]) -> str:
    """Refusals of shapes, and of splits of layers over a shape, must contain a fix."""
    refused = False
    for shape, answer in zip(shapes, answers(schedule, shapes), strict=True):
        refusals = [answer, *(layout for _, layout in _splits(schedule, shape))]
        for refusal in refusals:
            refused |= isinstance(refusal, ScheduleError)
            if isinstance(refusal, ScheduleError) and not refusal.fix:
                raise CheckFailed(f"{shape}: the refusal {refusal.what!r} has no fix that says what to do")
    return "" if refused else "it refuses nothing"


def _layouts_are_whole(schedule: Schedule, shapes: Sequence[Shape]) -> str:
    served = False
    for shape in shapes:
        for spec, layout in _splits(schedule, shape):
            if not isinstance(layout, ScheduleError):  # refusals are checked by _refusals_teach
                served = True
                _proven(str(shape), partial(check_layout, spec, layout))
    return "" if served else "it returns no layout"


def _splits(schedule: Schedule, shape: Shape) -> Iterator[tuple[LayoutSpec, tuple[Place, ...] | ScheduleError]]:
    """Layouts, or refusals, of an even split and of uneven counts: one layer less in the first place, one more last."""
    counts = [2] * (shape.stages * shape.chunks)
    counts[0] -= 1
    counts[-1] += 1
    for given in ((), tuple(counts)):
        spec = LayoutSpec(shape.stages, shape.chunks, sum(counts), given)
        try:
            yield spec, ask_layout(schedule, spec, shape)
        except ScheduleError as refusal:
            yield spec, refusal


def _places_stay(schedule: Schedule, shapes: Sequence[Shape]) -> None:
    """Places depend neither on the number of layers nor on steps that were planned before."""
    before: dict[tuple[int, int], tuple[Shape, tuple[Place, ...]]] = {}
    for answer in accepted(schedule, shapes):
        shape, layout = answer.shape, even_layout(schedule, answer.shape)
        _proven(str(shape), partial(check_same_places, layout, even_layout(schedule, shape, layers=1)))
        first, known = before.setdefault(shape[:2], (shape, layout))
        if layout != known:
            raise CheckFailed(f"{shape}: after its actions the layout is another than after those of {first}")


def _proven(where: str, proof: Callable[[], object]) -> None:
    try:
        proof()
    except ScheduleError as fault:
        raise CheckFailed(f"{where}: {fault}") from fault


def _lists_verify(schedule: Schedule, shapes: Sequence[Shape]) -> None:
    for shape, spec, lists in accepted(schedule, shapes):
        _proven(str(shape), partial(verify, spec, lists))


def _other_costs_verify(schedule: Schedule, shapes: Sequence[Shape]) -> None:
    served = [answer.shape for answer, _ in plans(schedule, shapes)]
    for costs in _OTHER_COSTS:
        text = ", ".join(f"{op} {cost:g}" for op, cost in costs.items())
        for shape, answer in zip(served, answers(schedule, served, costs), strict=True):
            if isinstance(answer, ScheduleError):
                raise CheckFailed(f"{shape} at costs {text}: refused, and served at the default costs: {answer}")
            _proven(f"{shape} at costs {text}", partial(verify, answer.spec, answer.lists))


def _is_pure(schedule: Schedule, shapes: Sequence[Shape]) -> None:
    """Request every shape twice, the second time in reverse order, to reveal hidden state."""
    first = dict(zip(shapes, answers(schedule, shapes), strict=True))
    second = dict(zip(shapes[::-1], answers(schedule, shapes[::-1]), strict=True))
    for shape in shapes:
        one, other = first[shape], second[shape]
        if isinstance(one, Answer) and isinstance(other, Answer):
            if one.spec.layout != other.spec.layout:
                raise CheckFailed(f"{shape}: two calls gave two layouts; a layout follows from its spec alone")
            _check_same_lists(one, other)
        elif isinstance(one, Answer) or isinstance(other, Answer):
            raise CheckFailed(f"{shape}: one call was refused, another was not; both follow from the spec alone")


def _check_same_lists(one: Answer, other: Answer) -> None:
    if one.lists == other.lists:
        return
    for stage, (actions, others) in enumerate(zip_longest(one.lists, other.lists, fillvalue=())):
        for index, (a, b) in enumerate(zip_longest(actions, others, fillvalue="nothing")):
            if a != b:
                raise CheckFailed(
                    f"{one.shape} stage {stage}, action {index}: two calls gave two action lists, with {a} and with "
                    f"{b}; a list follows from its spec alone"
                )


def _messages_arrive(schedule: Schedule, shapes: Sequence[Shape]) -> None:
    """Simulate the messages of small steps over channels with gloo's rules, and over one stream per stage as NCCL's."""
    small = [shape for shape in shapes if shape.microbatches <= _CARRIED]
    for answer, plan in plans(schedule, small):
        for lookahead, streams in ((1, per_channel), (None, per_stage)):
            programs = [lower(plan, stage, lookahead) for stage in range(plan.stages)]
            try:
                carry_out(programs, streams)
            except (SwappedMessageError, TransportDeadlockError) as error:
                raise CheckFailed(f"{answer.shape}: {error}") from error


def _warmup_equals(schedule: Schedule, shapes: Sequence[Shape], formula: Formula) -> None:
    for shape, spec, lists in accepted(schedule, shapes):
        for stage, actions in enumerate(lists):
            found = sum(1 for _ in takewhile(lambda action: action.op == "F", actions))
            warmup = formula(stage, spec)
            expected = min(warmup + 1, spec.microbatches * spec.chunks)
            if found != expected:
                raise CheckFailed(
                    f"{shape} stage {stage}: {found} forwards before the first backward, expected {expected} "
                    f"for a warm-up of {warmup}"
                )


def _in_flight_keeps(schedule: Schedule, shapes: Sequence[Shape], formula: Formula) -> None:
    for answer, plan in plans(schedule, shapes):
        for stage, found in enumerate(plan.peak_in_flight):
            bound = formula(stage, answer.spec)
            if found > bound:
                raise CheckFailed(
                    f"{answer.shape} stage {stage}: {found} chunk-microbatches in flight, at most {bound} promised"
                )


def _bubble_equals(schedule: Schedule, shapes: Sequence[Shape], formula: BubbleFormula) -> None:
    for answer, plan in plans(schedule, shapes):
        expected = formula(answer.spec)
        makespan = timeline(plan, stages=()).makespan
        ideal = max(sum(plan.costs[action.op] for action in actions) for actions in plan.lists)
        found = makespan / ideal - 1
        if expected is not None and abs(found - expected) > 1e-9:
            raise CheckFailed(
                f"{answer.shape}: a step takes {makespan:g} forwards of a chunk, {found:.4g} over the ideal {ideal:g}; "
                f"{expected:.4g} promised"
            )


def _is_ascending(schedule: Schedule, shapes: Sequence[Shape]) -> None:
    for answer, plan in plans(schedule, shapes):
        for stage, actions in enumerate(plan.lists):
            if fault := first_descent(actions):
                index, earlier = fault
                raise CheckFailed(
                    f"{answer.shape} stage {stage}, action {index}: {actions[index]} comes after {earlier}, and "
                    "microbatch order is promised"
                )
