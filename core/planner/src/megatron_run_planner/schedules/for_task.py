"""A schedule found for a task on a device, beside the installed schedules with the same split and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_run.contracts.costs import LayerKinds, ModelCosts
from megatron_run.contracts.schedule import ScheduleSpec
from megatron_run.errors import InputError, RunError
from megatron_run.pipeline.verify import verify
from megatron_run_planner.devices import Device
from megatron_run_planner.layer_time import Passes, embedding_time, layer_time
from megatron_run_planner.memory import available, head_activations, layer_activations, rank_memory
from megatron_run_planner.schedules.installed import Schedules
from megatron_run_planner.schedules.places import EFFORT, Found, search_schedule
from megatron_run_planner.schedules.workload_costs import Pipeline, Work
from megatron_run_planner.search import Candidate, Search
from megatron_run_planner.step_time import last_time, message_time
from megatron_run_planner.task import Task
from megatron_run_planner.workload import ModelSplit

#: Chunks a stage that are tried where the configuration leaves them open.
CHUNKS = (1, 2, 3)


def pipeline_of(model: ModelCosts, split: ModelSplit, device: Device) -> Pipeline:
    """The pipeline of ``split``: what its ranks compute for a microbatch, and what of the device's memory they have.

    ``chunks`` are those of ``split``. The memory leaves out what every rank holds whatever its layers, once: reserve,
    buffers, and what a backward takes, which is that of the model's kinds of layers.
    """
    inner = rank_memory(model, split, model.kinds, [False, False], 0)
    works = {}
    for kind in model.kinds.layers:
        state = rank_memory(model, split, LayerKinds(((1, kind),)), [False, False], 0).state
        works[kind] = _work(layer_time(kind, split, device), layer_activations(kind, split), state)
    ends = [
        rank_memory(model, split, model.kinds, has, 0).total - inner.total
        for has in ([True, False], [False, True], [True, True])
    ]
    return Pipeline(
        layers=tuple(works[each] for each in model.layers),
        before=_work(embedding_time(model, split, device), 0.0, ends[0]),
        after=_work(last_time(model, split, device), head_activations(model, split), ends[1]),
        stages=split.pipeline,
        chunks=split.chunks,
        microbatches=split.microbatches,
        message=message_time(model, split, device),
        memory=available(device.memory) - (inner.total - inner.state),
        shared=ends[0] + ends[1] - ends[2],
    )


def _work(passes: Passes, keeps: float, state: float) -> Work:
    return Work(passes.forward, passes.backward - passes.weights, passes.weights, keeps, state)


@dataclass(frozen=True)
class Answer:
    """The schedule that was found, as a ``candidate``, and the installed schedules, fastest first.

    ``bound`` is the time of a step that no lists with the same layers at each place can beat.
    """

    candidate: Candidate
    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    bound: float


def find_for_task(task: Task, device: Device, schedules: Schedules, seed: int = 0, effort: int = EFFORT) -> Answer:
    """Search lists for the split of ``task``; chunks and layers of a place are the configuration's where it says them.

    Raises :class:`InputError` for a task without stages, and when nothing fits the device.
    """
    if task.split.pipeline == 1:
        raise InputError(
            "parallel.pipeline is 1, and a schedule orders several stages", fix="--set parallel.pipeline=4"
        )
    if why := task.split.no_graph:
        raise InputError("graph-capture.scope=step with stages", why=why, fix="name segments in graph-capture.scope")
    search = Search(task.model, task.split.ranks, task.split.global_batch, device, schedules)
    splits = [replace(task.split, chunks=chunks) for chunks in _chunks(task)]
    installed = sorted(_installed(task, splits, search, schedules), key=lambda each: each.step.seconds)
    fitting = [each for each in installed if each.needed <= device.memory]
    found = [_searched(pipeline_of(task.model, split, device), task, fitting, seed, effort) for split in splits]
    best = min((each for each in found if isinstance(each, Found)), key=lambda each: each.seconds, default=None)
    if best is None:
        raise next(each for each in found if isinstance(each, InputError))
    pipeline = best.placed.pipeline
    shape = ScheduleSpec(best.placed.layout, pipeline.stages, pipeline.chunks, pipeline.microbatches)
    plan = verify(shape, best.lists)
    candidate = search.candidate(replace(task.split, chunks=pipeline.chunks), "searched", plan)
    bound = candidate.step.seconds - candidate.step.pipeline + best.bound
    too_large = tuple(each for each in installed if each.needed > device.memory)
    return Answer(candidate, tuple(fitting), too_large, bound)


def _chunks(task: Task) -> Sequence[int]:
    """The chunks of a stage to try."""
    said = task.counts or "chunks" in task.sections.get("parallel", {})
    most = len(task.model.layers) // task.split.pipeline
    return (task.split.chunks,) if said else [chunks for chunks in CHUNKS if chunks <= max(1, most)]


def _installed(task: Task, splits: Sequence[ModelSplit], search: Search, schedules: Schedules) -> Iterator[Candidate]:
    """The installed schedules that accept the split."""
    for split in splits:
        shape = len(task.model.layers), split.pipeline, split.chunks, split.microbatches
        for name in schedules.serving(split.chunks):
            try:
                plan = schedules.plan(name, *shape, task.counts)
            except RunError:
                continue
            yield search.candidate(split, name, plan)


def _searched(
    pipeline: Pipeline, task: Task, fitting: Sequence[Candidate], seed: int, effort: int
) -> Found | InputError:
    starts = [(each.plan.layout, each.plan.lists) for each in fitting if each.plan.chunks == pipeline.chunks]
    try:
        return search_schedule(pipeline, task.counts, starts, seed=seed, effort=effort)
    except InputError as error:
        return error
