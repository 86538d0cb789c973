"""The conformance suite of kind ``schedule``: run over a grid of shapes, it needs neither torch nor processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product, takewhile
from typing import NamedTuple

from megatron_run.actions import Action, LayoutSpec, Place, ScheduleSpec
from megatron_run.contracts import Schedule
from megatron_run.errors import ScheduleError
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import check_layout, verify
from megatron_run.testing.check import Check, CheckFailed


class Shape(NamedTuple):
    """P stages, V chunks a stage, M microbatches."""

    stages: int
    chunks: int
    microbatches: int

    def __str__(self) -> str:
        return f"P={self.stages} V={self.chunks} M={self.microbatches}"


#: The shapes that a schedule is tried on unless told otherwise; it may refuse some, not all.
SHAPES = tuple(Shape(*shape) for shape in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 6, 8)))

#: A number that a schedule's closed formula gives for one stage.
Formula = Callable[[int, ScheduleSpec], int]


def schedule_checks(
    schedule: Schedule,
    shapes: Sequence[Shape] = SHAPES,
    *,
    warmup: Formula | None = None,
    in_flight: Formula | None = None,
) -> tuple[Check, ...]:
    """The checks that every schedule must pass.

    Give ``warmup`` where the schedule has a closed formula for the forwards before its steady phase, which begins with
    a forward: the lists must then open with ``min(warmup + 1, M*V)`` forwards. Give ``in_flight`` where it promises how
    many chunk-microbatches each stage holds: the verifier's peak may not exceed it.
    """
    checks = {
        "it accepts a shape": _accepts_a_shape,
        "a refusal says what to do": _refusals_teach,
        "the layout holds every layer once": _layouts_are_whole,
        "the action lists are a legal plan": _lists_verify,
        "equal calls give equal answers": _is_pure,
    }
    if warmup:
        checks["the warm-up equals its formula"] = partial(_warmup_equals, formula=warmup)
    if in_flight:
        checks["memory in flight keeps its bound"] = partial(_in_flight_keeps, formula=in_flight)
    return tuple(Check(name, partial(check, schedule, tuple(shapes))) for name, check in checks.items())


def _spec(schedule: Schedule, shape: Shape) -> ScheduleSpec:
    """The question that the kernel would ask for this shape, with two layers a place."""
    layout = _layout(schedule, LayoutSpec(shape.stages, shape.chunks, 2 * shape.stages * shape.chunks), shape)
    return ScheduleSpec(layout, shape.stages, shape.chunks, shape.microbatches)


def _lists(schedule: Schedule, spec: ScheduleSpec, shape: Shape) -> tuple[tuple[Action, ...], ...]:
    with _only_schedule_errors(shape, "actions"):
        return tuple(tuple(actions) for actions in schedule.actions(spec))


def _layout(schedule: Schedule, spec: LayoutSpec, shape: Shape) -> tuple[Place, ...]:
    with _only_schedule_errors(shape, "layout"):
        return tuple(schedule.layout(spec))


@contextmanager
def _only_schedule_errors(shape: Shape, method: str) -> Iterator[None]:
    """Let refusals through; anything else that a plugin raises is a broken contract."""
    try:
        yield
    except ScheduleError:
        raise
    except Exception as error:
        raise CheckFailed(f"{shape}: {method} raised {error!r}; refuse a shape with ScheduleError") from error


def _answers(
    schedule: Schedule, shapes: Sequence[Shape]
) -> Iterator[tuple[Shape, ScheduleSpec, tuple[tuple[Action, ...], ...]]]:
    """The shapes that the schedule accepts, each with the question and the answer."""
    for shape in shapes:
        try:
            spec = _spec(schedule, shape)
            lists = _lists(schedule, spec, shape)
        except ScheduleError:
            continue  # a refusal, which another check reads
        yield shape, spec, lists


def _plans(schedule: Schedule, shapes: Sequence[Shape]) -> Iterator[tuple[Shape, ScheduleSpec, Plan]]:
    for shape, spec, lists in _answers(schedule, shapes):
        try:
            plan = verify(spec, lists)
        except ScheduleError as error:
            raise CheckFailed(f"{shape}: {error}") from error
        yield shape, spec, plan


def _accepts_a_shape(schedule: Schedule, shapes: Sequence[Shape]) -> None:
    if not any(_answers(schedule, shapes)):
        raise CheckFailed(f"it refuses all {len(shapes)} shapes, from {shapes[0]} to {shapes[-1]}")


def _refusals_teach(schedule: Schedule, shapes: Sequence[Shape]) -> None:
    for shape in shapes:
        try:
            _lists(schedule, _spec(schedule, shape), shape)
        except ScheduleError as refusal:
            if not refusal.fix:
                raise CheckFailed(f"{shape}: the refusal {refusal.what!r} has no fix that says what to do") from refusal


def _layouts_are_whole(schedule: Schedule, shapes: Sequence[Shape]) -> None:
    """Even splits and counts that the user gave: the first place one layer short, the last one over."""
    for shape in shapes:
        counts = [2] * (shape.stages * shape.chunks)
        counts[0] -= 1
        counts[-1] += 1
        for given in ((), tuple(counts)):
            spec = LayoutSpec(shape.stages, shape.chunks, sum(counts), given)
            try:
                layout = _layout(schedule, spec, shape)
            except ScheduleError:
                continue  # a refusal, which another check reads
            _check_layout(shape, spec, layout)


def _check_layout(shape: Shape, spec: LayoutSpec, layout: tuple[Place, ...]) -> None:
    try:
        check_layout(spec, layout)
    except ScheduleError as error:
        raise CheckFailed(f"{shape}: {error}") from error
    found = tuple(len(place.layers) for place in layout)
    if spec.counts and found != spec.counts:
        raise CheckFailed(f"{shape}: the layout holds {found} layers, the user asked for {spec.counts}")


def _lists_verify(schedule: Schedule, shapes: Sequence[Shape]) -> None:
    for _ in _plans(schedule, shapes):
        continue


def _is_pure(schedule: Schedule, shapes: Sequence[Shape]) -> None:
    """Ask every shape twice, the second time in the opposite order, so that whatever is remembered shows."""
    first = {shape: (spec, lists) for shape, spec, lists in _answers(schedule, shapes)}
    second = {shape: (spec, lists) for shape, spec, lists in _answers(schedule, shapes[::-1])}
    for shape in shapes:
        (spec, lists), (again, lists_again) = first.get(shape, (None, None)), second.get(shape, (None, None))
        if (spec and spec.layout) != (again and again.layout):
            raise CheckFailed(f"{shape}: two calls gave two layouts; a layout follows from its spec alone")
        if lists != lists_again:
            raise CheckFailed(f"{shape}: two calls gave two action lists; a list follows from its spec alone")


def _warmup_equals(schedule: Schedule, shapes: Sequence[Shape], formula: Formula) -> None:
    for shape, spec, lists in _answers(schedule, shapes):
        for stage, actions in enumerate(lists):
            found = sum(1 for _ in takewhile(lambda action: action.op == "F", actions))
            warmup = formula(stage, spec)
            expected = min(warmup + 1, spec.microbatches * spec.chunks)
            if found != expected:
                raise CheckFailed(
                    f"{shape} rank {stage}: {found} forwards before the first backward, expected {expected} "
                    f"for a warm-up of {warmup}"
                )


def _in_flight_keeps(schedule: Schedule, shapes: Sequence[Shape], formula: Formula) -> None:
    for shape, spec, plan in _plans(schedule, shapes):
        for stage, found in enumerate(plan.peak_in_flight):
            bound = formula(stage, spec)
            if found > bound:
                raise CheckFailed(
                    f"{shape} rank {stage}: {found} chunk-microbatches in flight, at most {bound} promised"
                )
