"""Counts the activations that a microbatch leaves behind for its backward, chunk by chunk, without computing any.

The very chunks of a run are built and run on fake tensors, which have shapes and no values, and every tensor that
autograd saves is counted once by its storage. So recomputation, tensor and sequence parallelism, dropout masks, logits
and what the loss keeps are counted as they are written. Attention is counted with the CPU's fused kernel, which keeps
what a GPU's does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from megatron_run.contracts import Microbatch
from megatron_run.contracts.topology import Topology
from megatron_run.errors import RunError
from megatron_run_engine.runtime.comm import Groups, ParallelGroup, Pending
from megatron_run_engine.training.build import build_chunks, make_context, make_layers, with_vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel
    from torch import Tensor, nn

    from megatron_run.contracts import Boundary, Chunk, DataSource, Field
    from megatron_run.contracts.schedule import Action
    from megatron_run.contracts.topology import Axis
    from megatron_run.planning import ResolvedRun

_CPU = torch.device("cpu")


class PlannedGroup(ParallelGroup):
    """Peers that exist on paper: results have their shapes, and nothing travels."""

    def start_gather(self, part: Tensor) -> Pending:
        """As many rows as all peers have."""
        return Pending(part.new_empty((self.size * part.shape[0], *part.shape[1:])))

    def start_scatter_sum(self, whole: Tensor) -> Pending:
        """One peer's rows."""
        return Pending(whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:])))

    @property
    def _several(self) -> bool:
        return False  # the other collectives keep the shape of what they are given


@dataclass(frozen=True)
class PlannedGroups(Groups):
    """No process group, and :class:`PlannedGroup` along every axis."""

    def parallel_group(self, topology: Topology, axis: Axis) -> ParallelGroup:
        """The peers along ``axis``."""
        members = topology.peers(axis)
        return PlannedGroup(members.index(topology.rank), len(members), None, axis, self.activity)


def peak_activations(run: ResolvedRun) -> list[int] | None:
    """The most bytes of activations that a rank of each stage holds in a step of the full batch.

    None where layers cannot run without values: experts whose shapes follow the routing, kernels of other libraries.
    The model must have been built once (``model_size``), which says what is wrong with it.
    """
    data = cast("DataSource", run.one("data").create())
    options = with_vocabulary(run, data)
    plan = run.plans[max(run.plans)]
    try:
        return [
            peak_saved(plan.lists[stage], saved_by_chunk(run, options, data, stage)) for stage in range(plan.stages)
        ]
    except (RuntimeError, RunError):
        # Torch's, of a layer that reads values; and of layers that need a GPU, since the model was built on the meta
        # device before.
        return None


def saved_by_chunk(run: ResolvedRun, options: BaseModel, data: DataSource, stage: int) -> list[int]:
    """Bytes that each chunk of ``stage`` keeps of one microbatch from its forward to its backward.

    ``options`` are the model's with the vocabulary filled in. Parameters, and what a pass starts from, do not count.
    """
    first = Topology(run.sizes, 0)
    topology = Topology(run.sizes, first.rank_at(tensor=0, context=0, data=0, stage=stage))
    with FakeTensorMode():
        context = make_context(run, topology, PlannedGroups(), _CPU, options, data.fields)
        model, positions, chunks = build_chunks(run, context, make_layers(run, context))
        train = run.config.train
        size, length = train.micro_batch_size, train.sequence_length
        microbatch = Microbatch(0, 1, 0, {field.name: microbatch_field(field, size, length) for field in data.fields})
        found = []
        for position, chunk in zip(positions, chunks, strict=True):
            boundary = model.boundary(microbatch, size, length)
            x, beside = received_tensors(boundary) if position else (None, {})
            with context.rng.left_alone():
                found.append(_saved(chunk, x, beside, microbatch))
    return found


def microbatch_field(field: Field, size: int, length: int) -> Tensor:
    """A microbatch of ``field``, of which sizes that the data chooses count as 1."""
    sizes = [length if each == "s" else each or 1 for each in field.shape]
    return torch.zeros((size, *sizes), dtype=getattr(torch, field.dtype))


def received_tensors(boundary: Boundary) -> tuple[Tensor, dict[str, Tensor]]:
    """What a chunk gets from the one before it, of which sizes that only the sender knows count as 1."""
    x, *beside = (
        torch.zeros([size or 1 for size in each.shape], dtype=each.dtype, requires_grad=True)
        for each in boundary.tensors
    )
    return x, dict(zip(boundary.beside, beside, strict=True))


def _saved(chunk: Chunk, x: Tensor | None, beside: dict[str, Tensor], microbatch: Microbatch) -> int:
    """Bytes of the storages that ``chunk`` saves, its parameters' and the batch's aside.

    What it received counts in any case: the executor holds it until the backward, for its gradient.
    """
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # a storage that is freed would give its number to another one

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    for received in (*([] if x is None else [x]), *beside.values()):
        pack(received)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = chunk(x, microbatch, **beside)
    module = cast("nn.Module", chunk)  # as every chunk of the engine's models
    others = [*module.parameters(), *module.buffers(), *microbatch.fields.values()]
    for tensor in others:
        kept.pop(tensor.untyped_storage()._cdata, None)
    del out
    return sum(kept.values())


def peak_saved(actions: Sequence[Action], by_chunk: Sequence[int]) -> int:
    """The most bytes that the microbatches of a stage's list hold at once: from F (or R) to B or W."""
    recomputed = {action[1:] for action in actions if action.op == "R"}
    held = peak = 0
    for op, microbatch, chunk in actions:
        if op == "R" or (op == "F" and (microbatch, chunk) not in recomputed):
            held += by_chunk[chunk]
        elif op in "BW":
            held -= by_chunk[chunk]
        peak = max(peak, held)
    return peak
