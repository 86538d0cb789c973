"""A model on a device as a :class:`Pipeline`: the planner's seconds and bytes of its layers, embedding and head."""

from __future__ import annotations

from megatron_run_planner.devices import Device
from megatron_run_planner.layer_time import Passes, embedding_time, layer_time
from megatron_run_planner.memory import available, layer_activations, rank_memory
from megatron_run_planner.schedules.workload_costs import Pipeline, Work
from megatron_run_planner.step_time import last_time, message_time
from megatron_run_planner.workload import Model, Split


def pipeline_of(model: Model, split: Split, device: Device) -> Pipeline:
    """The pipeline of ``split``: what its ranks compute for a microbatch, and what of the device's memory they have.

    ``chunks`` are those of ``split``. The memory leaves out what every rank holds whatever its layers: buffers and
    reserve.
    """
    none = rank_memory(model, split, 0, [False, False], 0).total
    kinds = [model.kind_of(layer) for layer in range(model.layers)]
    works = {}
    for kind in set(kinds):
        state = rank_memory(kind, split, 1, [False, False], 0).total - none
        works[kind] = _work(layer_time(kind, split, device), layer_activations(kind, split), state)
    ends = [rank_memory(model, split, 0, has, 0).total - none for has in ([True, False], [False, True], [True, True])]
    return Pipeline(
        layers=tuple(works[each] for each in kinds),
        before=_work(embedding_time(model, split, device), 0.0, ends[0]),
        after=_work(last_time(model, split, device), 0.0, ends[1]),
        stages=split.pipeline,
        chunks=split.chunks,
        microbatches=split.microbatches,
        message=message_time(model, split, device),
        memory=available(device.memory) - none,
        shared=ends[0] + ends[1] - ends[2],
    )


def _work(passes: Passes, keeps: float, state: float) -> Work:
    return Work(passes.forward, passes.backward - passes.weights, passes.weights, keeps, state)
