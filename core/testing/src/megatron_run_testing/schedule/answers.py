"""Calls of a schedule as the kernel makes them, with checks of the form of its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from megatron_run.contracts import Schedule
from megatron_run.contracts.schedule import COSTS, Action, LayoutSpec, Place, ScheduleSpec
from megatron_run.errors import ScheduleError
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import verify
from megatron_run_testing import CheckFailed

Item = TypeVar("Item")


class Shape(NamedTuple):
    """P stages, V chunks per stage, M microbatches."""

    stages: int
    chunks: int
    microbatches: int

    def __str__(self) -> str:
        return f"P={self.stages} V={self.chunks} M={self.microbatches}"


#: The default grid of shapes; a schedule may refuse some of them, but not all.
SHAPES = tuple(Shape(*shape) for shape in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 6, 8)))


class Answer(NamedTuple):
    """A shape that the schedule accepts, with the spec and the lists of all stages."""

    shape: Shape
    spec: ScheduleSpec
    lists: tuple[tuple[Action, ...], ...]


class NothingToTryError(Exception):
    """A check does not apply to the schedule; the message states why."""


def answers(
    schedule: Schedule, shapes: Sequence[Shape], costs: Mapping[str, float] = COSTS
) -> Iterator[Answer | ScheduleError]:
    """For each shape, the schedule's answer or its refusal. Anything else raises :class:`CheckFailed`."""
    for shape in shapes:
        try:
            spec = ScheduleSpec(even_layout(schedule, shape), *shape, MappingProxyType(dict(costs)))
            yield Answer(shape, spec, ask_actions(schedule, spec, shape))
        except ScheduleError as refusal:
            yield refusal


def accepted(schedule: Schedule, shapes: Sequence[Shape], costs: Mapping[str, float] = COSTS) -> Iterator[Answer]:
    """The answers for the shapes that the schedule accepts."""
    return (answer for answer in answers(schedule, shapes, costs) if isinstance(answer, Answer))


def plans(schedule: Schedule, shapes: Sequence[Shape]) -> Iterator[tuple[Answer, Plan]]:
    """The accepted shapes with their verified plans. Raises :class:`NothingToTryError` at an illegal one.

    Another check reports that one, and what holds for the rest says little about the schedule.
    """
    for answer in accepted(schedule, shapes):
        try:
            plan = verify(answer.spec, answer.lists)
        except ScheduleError as fault:
            raise NothingToTryError(f"{answer.shape} has no legal plan") from fault
        yield answer, plan


def even_layout(schedule: Schedule, shape: Shape, layers: int = 2) -> tuple[Place, ...]:
    """The layout with ``layers`` layers per place."""
    places = shape.stages * shape.chunks
    return ask_layout(schedule, LayoutSpec(shape.stages, shape.chunks, layers * places), shape)


def ask_layout(schedule: Schedule, spec: LayoutSpec, shape: Shape) -> tuple[Place, ...]:
    """The layout for ``spec``; a refusal raises the schedule's :class:`~megatron_run.errors.ScheduleError`."""
    with _only_schedule_errors(shape, "layout"):
        answer = schedule.layout(spec)
    layout = _sequence(answer, f"{shape}: layout", "the places in model order")
    for position, place in enumerate(layout):
        if not isinstance(place, Place):
            raise CheckFailed(
                f"{shape}: place {position} of the layout is {place!r}; write Place(stage, chunk, layers)"
            )
    return layout


def ask_actions(schedule: Schedule, spec: ScheduleSpec, shape: Shape) -> tuple[tuple[Action, ...], ...]:
    """The lists of all stages; a refusal raises the schedule's :class:`~megatron_run.errors.ScheduleError`."""
    with _only_schedule_errors(shape, "actions"):
        answer = schedule.actions(spec)
    lists = _sequence(answer, f"{shape}: actions", "a list of actions for each stage")
    return tuple(_sequence(each, f"{shape} stage {stage}: actions", "a list") for stage, each in enumerate(lists))


def _sequence(answer: Sequence[Item], where: str, must: str) -> tuple[Item, ...]:
    """``answer`` as a tuple, so that the schedule cannot change it later."""
    if not isinstance(answer, Sequence):
        raise CheckFailed(f"{where} returned {answer!r}; it must return {must}")
    return tuple(answer)


@contextmanager
def _only_schedule_errors(shape: Shape, method: str) -> Iterator[None]:
    """Pass refusals on; any other exception of the plugin is a broken contract."""
    try:
        yield
    except ScheduleError:
        raise
    except (Exception, SystemExit) as error:
        raise CheckFailed(f"{shape}: {method} raised {error!r}; refuse a shape with ScheduleError") from error
