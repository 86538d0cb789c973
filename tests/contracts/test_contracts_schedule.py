"""The suite of kind schedule fails what it should, and says where."""

from collections.abc import Callable, Sequence

import pytest

from megatron_run.actions import Action, LayoutSpec, Place, ScheduleSpec
from megatron_run.contracts import Schedule
from megatron_run.errors import ScheduleError
from megatron_run.testing.check import CheckFailed
from megatron_run.testing.schedule import Formula, schedule_checks


class Pipelined(Schedule):
    """1F1B with ``extra`` forwards more than the formula's warm-up."""

    def __init__(self, extra: int = 0) -> None:
        self.extra = extra

    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        if spec.chunks > 1:
            raise ScheduleError("one chunk a stage", fix="set parallel.chunks=1")
        return [self.stage(stage, spec) for stage in range(spec.stages)]

    def stage(self, stage: int, spec: ScheduleSpec) -> list[Action]:
        forwards = [Action("F", m, 0) for m in range(spec.microbatches)]
        backwards = [Action("B", m, 0) for m in range(spec.microbatches)]
        warmup = min(closed_warmup(stage, spec) + self.extra, spec.microbatches)
        steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
        return forwards[:warmup] + steady + backwards[spec.microbatches - warmup :]


class Forgetful(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        return [list(actions)[: -1 if stage == 1 else None] for stage, actions in enumerate(super().actions(spec))]


class Remembering(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        self.extra += 1
        return super().actions(spec)


class Crashing(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        return [[][spec.microbatches]]


class Silent(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        raise ScheduleError("no")


class DropsALayer(Pipelined):
    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        *places, last = super().layout(spec)
        return (*places, last._replace(layers=last.layers[:-1]))


class IgnoresCounts(Pipelined):
    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        return super().layout(LayoutSpec(spec.stages, spec.chunks, spec.layers))


def closed_warmup(stage: int, spec: ScheduleSpec) -> int:
    return min(spec.stages - stage - 1, spec.microbatches)


def closed_in_flight(stage: int, spec: ScheduleSpec) -> int:
    return min(spec.stages - stage, spec.microbatches)


def run(schedule: Schedule, name: str, warmup: Formula | None = None, in_flight: Formula | None = None) -> None:
    checks = schedule_checks(schedule, warmup=warmup, in_flight=in_flight)
    {check.name: check for check in checks}[name].run()


def test_a_good_schedule_passes_every_check() -> None:
    checks = schedule_checks(Pipelined(), warmup=closed_warmup, in_flight=closed_in_flight)
    assert len(checks) == 7
    for check in checks:
        check.run()


def test_a_warmup_that_differs_from_its_formula_is_rejected() -> None:
    with pytest.raises(CheckFailed) as failure:
        run(Pipelined(extra=1), "the warm-up equals its formula", warmup=closed_warmup)
    assert str(failure.value) == (
        "P=1 V=1 M=2 rank 0: 2 forwards before the first backward, expected 1 for a warm-up of 0"
    )


def test_holding_more_than_promised_is_rejected() -> None:
    with pytest.raises(CheckFailed, match="P=1 V=1 M=2 rank 0: 2 chunk-microbatches in flight, at most 1 promised"):
        run(Pipelined(extra=1), "memory in flight keeps its bound", in_flight=closed_in_flight)


@pytest.mark.parametrize(
    ("schedule", "name", "words"),
    [
        (Forgetful, "the action lists are a legal plan", r"P=2 V=1 M=1: rank 1: B0\.0 is missing"),
        (Remembering, "equal calls give equal answers", r"two calls gave two action lists"),
        (Crashing, "it accepts a shape", r"P=1 V=1 M=1: actions raised IndexError"),
        (Silent, "it accepts a shape", r"it refuses all 72 shapes, from P=1 V=1 M=1 to P=4 V=3 M=8"),
        (Silent, "a refusal says what to do", r"P=1 V=1 M=1: the refusal 'no' has no fix"),
        (DropsALayer, "the layout holds every layer once", r"P=1 V=1 M=1: the layout holds the layers \[0\]"),
        (IgnoresCounts, "the layout holds every layer once", r"holds \(2, 2\) layers, the user asked for \(1, 3\)"),
    ],
)
def test_a_broken_contract_is_named(schedule: Callable[[], Schedule], name: str, words: str) -> None:
    with pytest.raises(CheckFailed, match=words):
        run(schedule(), name)
