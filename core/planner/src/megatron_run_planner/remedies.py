"""Remedies for a run that does not fit: each setting that saves memory, alone, and the fewest that suffice together.

A remedy is judged by the difference that it makes to the planner's own count, on top of the bytes that the caller knows
better: a dry run counts its activations layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_run.contracts.costs import ModelCosts
from megatron_run.errors import InputError, RunError
from megatron_run_planner.devices import Device
from megatron_run_planner.schedules import Schedules
from megatron_run_planner.search import Candidate, Search
from megatron_run_planner.split_samples import short, why_not
from megatron_run_planner.task import Task
from megatron_run_planner.task.optimizer import chosen_by_split
from megatron_run_planner.workload import OPTIMIZERS, ModelSplit, Optimizer, split_over


@dataclass(frozen=True)
class Remedy:
    """Settings to change, as ``KEY=VALUE``; bytes that the fullest rank then needs, and the step's time over today's.

    ``devices`` is the number of all devices, which differs where the copies of the model cannot be halved.
    """

    settings: tuple[str, ...]
    needed: float
    slowdown: float
    devices: int


@dataclass(frozen=True)
class Remedies:
    """Every remedy ``alone``, those that suffice first, the fastest before others; and ``together`` if none does."""

    alone: tuple[Remedy, ...]
    together: Remedy | None


def remedies(task: Task, device: Device, schedules: Schedules, counted: float) -> Remedies:
    """Changes of ``task``, whose fullest rank needs ``counted`` bytes. Nothing where the planner refuses it."""
    judge = _Judge(task, device, schedules, counted)
    if judge.now is None:
        return Remedies((), None)
    steps = [(settings, judge.remedy(settings, split)) for settings, split in changes(task.split, task, device)]
    alone = sorted(
        (found for _, found in steps if found and found.needed < counted),
        key=lambda each: (each.needed > device.memory, each.slowdown if each.needed <= device.memory else each.needed),
    )
    fits = alone and alone[0].needed <= device.memory
    return Remedies(tuple(alone), None if fits else _together(judge, task, device))


class _Judge:
    """Compares splits of a task with the one that it has."""

    def __init__(self, task: Task, device: Device, schedules: Schedules, counted: float) -> None:
        self._task, self._device, self._schedules, self._counted = task, device, schedules, counted
        self.now = self._described(task.split)

    def remedy(self, settings: tuple[str, ...], split: ModelSplit) -> Remedy | None:
        """The bytes and seconds of ``split``; None when its schedule refuses it."""
        then = self._described(split)
        if then is None or self.now is None:
            return None
        needed = self._counted + then.needed - self.now.needed
        speed = self.now.step.seconds / then.step.seconds * self._task.split.ranks / split.ranks
        return Remedy(settings, needed, 1 / speed, split.ranks)

    def _described(self, split: ModelSplit) -> Candidate | None:
        schedule = "1f1b" if split.pipeline > 1 and self._task.split.pipeline == 1 else self._task.schedule
        try:
            model, growth = self._task.model, self._task.growth
            search = Search(model, split.ranks, split.global_batch, self._device, self._schedules, growth)
            return search.describe(split, schedule)
        except RunError:
            return None


def _together(judge: _Judge, task: Task, device: Device) -> Remedy | None:
    """Change what saves most, again and again, until it suffices; None where that leads nowhere on as many devices."""
    split, settings, last = task.split, tuple[str, ...](), None
    while last is None or last.needed > device.memory:
        steps = [
            (judge.remedy(_merged(settings, more), each), each)
            for more, each in changes(split, task, device)
            if each.ranks == task.split.ranks
        ]
        found = [(remedy, each) for remedy, each in steps if remedy]
        if not found:
            return None
        best, split = min(found, key=lambda pair: pair[0].needed)
        if last is not None and best.needed >= last.needed:
            return None
        last, settings = best, best.settings
    return last


def _merged(settings: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    """Both, the later value of a key in place of the earlier."""
    pairs = dict(each.split("=", 1) for each in (*settings, *more))
    return tuple(f"{key}={value}" for key, value in pairs.items())


def changes(split: ModelSplit, task: Task, device: Device) -> Iterator[tuple[tuple[str, ...], ModelSplit]]:
    """Each single change of ``split`` that saves memory somewhere, with its settings."""
    model = task.model
    yield from _of_optimizer(split, task, device)
    if split.tensor > 1 and not split.sequence_parallel:
        yield ("parallel.sequence=true",), replace(split, sequence_parallel=True)
    if split.recompute in ("none", "core") and not model.experts:
        yield ("train.recompute=mlp",), replace(split, recompute="mlp")
    if split.recompute != "full":
        yield ("train.recompute=full",), replace(split, recompute="full")
    if split.micro_batch > 1:
        half = split.micro_batch // 2
        if not split.global_batch % (half * split.data):
            yield (f"train.micro_batch_size={half}",), replace(split, micro_batch=half)
    wider = replace(split, tensor=2 * split.tensor, **_copies(split))
    if wider.tensor <= device.links.machine and _splits(model, wider.tensor) and not wider.no_graph:
        plugin = (_layers(wider),) if split.tensor == 1 else ()
        yield (*plugin, f"parallel.tensor={wider.tensor}", f"parallel.data={wider.data}"), wider
    longer = replace(split, context=2 * split.context, **{**_copies(split), "optimizer": split.optimizer})
    if not (short(model, longer) or why_not(model, longer) or longer.no_graph):
        plugin = (_layers(longer),) if split.context == 1 else ()
        yield (*plugin, f"parallel.context={longer.context}", f"parallel.data={longer.data}"), longer
    deeper = replace(split, pipeline=2 * split.pipeline, **_copies(split))
    if deeper.pipeline * deeper.chunks <= len(model.layers) and not deeper.no_graph:
        plugin = ("schedule=1f1b",) if split.pipeline == 1 else ()
        yield (*plugin, f"parallel.pipeline={deeper.pipeline}", f"parallel.data={deeper.data}"), deeper


def _of_optimizer(split: ModelSplit, task: Task, device: Device) -> Iterator[tuple[tuple[str, ...], ModelSplit]]:
    for optimizer in _sharing_more(split, task):
        yield (f"optimizer={optimizer}",), replace(split, optimizer=optimizer)
    if not split.on_host and device.cores is None and chosen_by_split(task.sections):
        yield ("optimizer.state_on_host=true",), replace(split, on_host=True)


def _sharing_more(split: ModelSplit, task: Task) -> Sequence[Optimizer]:
    """The optimizers that ``task`` may have by which copies of the model share out more than by that of ``split``."""
    more = OPTIMIZERS[1 + OPTIMIZERS.index(split.optimizer) :] if split.replicas > 1 else ()
    return [each for each in more if each in task.optimizers]


def _layers(split: ModelSplit) -> str:
    """The setting of the layers that ``split`` takes."""
    return f"parallel-layer={'tensor' if split.tensor > 1 else 'dense'}{'+context' if split.context > 1 else ''}"


def _splits(model: ModelCosts, tensor: int) -> bool:
    try:
        split_over(model, tensor)
    except InputError:
        return False
    return True


def _copies(split: ModelSplit) -> dict[str, Any]:
    """Half the copies of the model, on as many devices, where they and the experts on them divide."""
    halves = not (split.data % 2 or split.data // 2 % split.expert)
    return {"data": split.data // 2, "optimizer": split.optimizer if split.replicas > 2 else "adamw"} if halves else {}
