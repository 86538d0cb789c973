"""Schedules that break the contract of their kind, one way each, and the good one from which they are made."""

from collections.abc import Sequence

from megatron_run.contracts import Schedule
from megatron_run.contracts.schedule import Action, LayoutSpec, Place, ScheduleSpec
from megatron_run.errors import ScheduleError


def closed_warmup(stage: int, spec: ScheduleSpec) -> int:
    return min(spec.stages - stage - 1, spec.microbatches)


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
    def stage(self, stage: int, spec: ScheduleSpec) -> list[Action]:
        return super().stage(stage, spec)[: -1 if stage == 1 else None]


class Repeating(Pipelined):
    def stage(self, stage: int, spec: ScheduleSpec) -> list[Action]:
        return super().stage(stage, spec) + [Action("F", 0, 0)] * stage


class BackwardFirst(Pipelined):
    def stage(self, stage: int, spec: ScheduleSpec) -> list[Action]:
        return super().stage(stage, spec)[::-1]


class Stuck(Pipelined):
    """The first stage takes one microbatch after the other, the second all forwards first."""

    def stage(self, stage: int, spec: ScheduleSpec) -> list[Action]:
        pairs = [Action(op, m, 0) for m in range(spec.microbatches) for op in ("F", "B")]
        return sorted(pairs, key=lambda action: action.op, reverse=True) if stage else pairs


class OneStageShort(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        return super().actions(spec)[:-1]


class ChunkFromOne(Pipelined):
    def stage(self, stage: int, spec: ScheduleSpec) -> list[Action]:
        return [action._replace(chunk=1) for action in super().stage(stage, spec)]


class Greedy(Pipelined):
    """One forward more than the warm-up of 1F1B."""

    def __init__(self) -> None:
        super().__init__(extra=1)


class Lazy(Pipelined):
    """One microbatch at a time through all stages."""

    def stage(self, stage: int, spec: ScheduleSpec) -> list[Action]:
        return [Action(op, m, 0) for m in range(spec.microbatches) for op in ("F", "B")]


class Crossing(Pipelined):
    """The second stage takes the microbatches in the opposite order."""

    def stage(self, stage: int, spec: ScheduleSpec) -> list[Action]:
        order = range(spec.microbatches)
        forwards, backwards = (order[::-1], order) if stage else (order, order)
        return [Action("F", m, 0) for m in forwards] + [Action("B", m, 0) for m in backwards]


class WeightsLate(Pipelined):
    """Every input gradient, then every weight gradient."""

    weights = 1

    def stage(self, stage: int, spec: ScheduleSpec) -> list[Action]:
        order = range(spec.microbatches)
        late = [Action("W", m, 0) for m in order][:: self.weights]
        return [Action(op, m, 0) for op in ("F", "I") for m in order] + late


class WeightsLast(WeightsLate):
    """The same with the weight gradients from the last microbatch to the first."""

    weights = -1


class Descending(Pipelined):
    """All forwards, then all backwards from the last microbatch to the first."""

    def stage(self, stage: int, spec: ScheduleSpec) -> list[Action]:
        forwards = [Action("F", m, 0) for m in range(spec.microbatches)]
        return forwards + [action._replace(op="B") for action in reversed(forwards)]


class Remembering(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        self.extra += 1
        return super().actions(spec)


class RefusesTheSecondTime(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        self.extra += 1
        if self.extra > 100:
            raise ScheduleError("enough", fix="ask less")
        return Pipelined().actions(spec)


class Crashing(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        return [[][spec.microbatches]]


class Yielding(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        return [iter(actions) for actions in super().actions(spec)]  # type: ignore[misc]  # the fault that is tested


class ReturnsNothing(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        return None  # type: ignore[return-value]  # the fault that is tested


class Silent(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        raise ScheduleError("no")


class DropsALayer(Pipelined):
    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        *places, last = super().layout(spec)
        return (*places, last._replace(layers=last.layers[:-1]))


class RepeatsALayer(Pipelined):
    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        first, *places = super().layout(spec)
        return (first, *(place._replace(layers=range(place.layers.stop)) for place in places))


class IgnoresCounts(Pipelined):
    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        return super().layout(LayoutSpec(spec.stages, spec.chunks, spec.layers))


class RefusesCounts(Pipelined):
    """Even splits only, and it does not say what to do instead."""

    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        if spec.counts:
            raise ScheduleError("uneven")
        return super().layout(spec)


class LacksAPlace(Pipelined):
    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        return super().layout(spec)[: spec.stages]


class PutsTwoInOnePlace(Pipelined):
    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        return tuple(place._replace(stage=0) for place in super().layout(spec))


class BarePlaces(Pipelined):
    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        return tuple(tuple(place) for place in super().layout(spec))  # type: ignore[misc]  # the fault that is tested


class TurnsWithLayers(Pipelined):
    """The stages from the last to the first as soon as a place has more than one layer."""

    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        places = super().layout(spec)
        last = spec.stages - 1
        return places if spec.layers == len(places) else tuple(p._replace(stage=last - p.stage) for p in places)


class TurnsWithMicrobatches(Pipelined):
    """The stages from the last to the first after a step of an even number of microbatches."""

    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        last = spec.stages - 1
        return tuple(p._replace(stage=last - p.stage if self.extra else p.stage) for p in super().layout(spec))

    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        self.extra = 1 - spec.microbatches % 2
        return Pipelined().actions(spec)


class NeedsEveryCost(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        self.extra = int(spec.costs["W"] > 100)
        return super().actions(spec)


class ChangesCosts(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        spec.costs["B"] = 0  # type: ignore[index]  # the fault that is tested
        return super().actions(spec)


class SkipsTheCheap(Pipelined):
    """Backwards that cost more than two forwards are left for another day."""

    def stage(self, stage: int, spec: ScheduleSpec) -> list[Action]:
        return [action for action in super().stage(stage, spec) if spec.costs[action.op] <= 2]


class RefusesCosts(Pipelined):
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        if spec.costs["B"] != 2:
            raise ScheduleError("backwards cost two", fix="set their cost to 2")
        return super().actions(spec)
