"""torch's own data parallelism: ``DistributedDataParallel``, with ``ZeroRedundancyOptimizer`` too, and FSDP2.

Each with the settings that are its fastest here.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.optimizer.model import CLIP, Batch, gathered
from benchmarks.optimizer.ours import Ranks
from benchmarks.optimizer.peers.autograd import ADAMW, by_name, bytes_of, groups, logical, plain_model
from benchmarks.support.shape import Shape
from megatron_run_engine.nn import DecoderChunk


class DdpSide:
    """``DistributedDataParallel`` with gradients in its buckets; the update replicated, or shared out."""

    def __init__(self, ranks: Ranks, shape: Shape, batch: Batch, *, zero: bool = False) -> None:
        self._batch = batch
        model, self._infos = plain_model(ranks, shape)
        self._model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        grouped = groups(self._infos.items())
        self._optimizer = _adamw(grouped, zero=zero)
        #: What holds this rank's state: ``ZeroRedundancyOptimizer`` has an optimizer within.
        self._holder = self._optimizer.optim if zero else self._optimizer

    def step(self) -> None:
        """All microbatches but the last without reduction."""
        self._optimizer.zero_grad(set_to_none=False)  # gradients are views of the buckets
        losses = list[Tensor]()
        for index, microbatch in enumerate(self._batch):
            last = index == self._batch.microbatches - 1
            with nullcontext() if last else self._model.no_sync():
                loss = self._model(microbatch)
                (loss / self._batch.microbatches).backward()
            losses.append(loss.detach())
        self.losses = torch.stack(losses)
        torch.nn.utils.clip_grad_norm_(self._infos, CLIP, foreach=True)
        self._optimizer.step()

    def first_moments(self) -> Mapping[str, Tensor]:
        """Those of each parameter from the rank that has it."""
        state = self._holder.state
        local = logical((state[p]["exp_avg"], info) for p, info in self._infos.items() if p in state)
        return {name: tensor for rank in gathered(local) for name, tensor in rank.items()}

    def state_bytes(self) -> int:
        """Of all parameters, or of those that this rank updates."""
        return bytes_of(self._holder.state)


def _adamw(groups: list[dict[str, Any]], *, zero: bool) -> Any:
    """AdamW, or the one that shares parameters out: its package, when imported, warns of its own code."""
    if not zero:
        return torch.optim.AdamW(groups, **ADAMW)
    kind = import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    return kind(groups, optimizer_class=torch.optim.AdamW, **ADAMW)


class FsdpSide:
    """``fully_shard`` by block; parameters and gradients stay whole between the first microbatch and the last.

    With ``resharding`` they are whole only where they are needed: gathered before a block's forward and backward, and
    reduced after each microbatch.
    """

    def __init__(self, ranks: Ranks, shape: Shape, batch: Batch, *, resharding: bool = False) -> None:
        from torch.distributed.fsdp import fully_shard  # a second of imports

        self._batch, self._resharding = batch, resharding
        model, infos = plain_model(ranks, shape)
        named, chunk = by_name(model, infos), model.chunk
        assert isinstance(chunk, DecoderChunk)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        # A block is not called as a whole, but its halves are; nor is the head.
        together = [[half for half in block.children() if list(half.parameters())] for block in chunk.layers.values()]
        for modules in (*together, [module for module in (chunk.final_norm, chunk.output) if module is not None]):
            fully_shard(modules, mesh=mesh, reshard_after_forward=resharding)
        self._model: Any = fully_shard(model, mesh=mesh, reshard_after_forward=resharding)
        self._infos = {parameter: named[name] for name, parameter in model.named_parameters()}
        self._optimizer = torch.optim.AdamW(groups(self._infos.items()), **ADAMW)

    def step(self) -> None:
        """All microbatches but the last without reduction."""
        self._optimizer.zero_grad()
        losses = list[Tensor]()
        for index, microbatch in enumerate(self._batch):
            if not self._resharding:
                self._sync(last=index == self._batch.microbatches - 1)
            loss = self._model(microbatch)
            (loss / self._batch.microbatches).backward()
            losses.append(loss.detach())
        self.losses = torch.stack(losses)
        torch.nn.utils.clip_grad_norm_(self._infos, CLIP, foreach=True)
        self._optimizer.step()

    def _sync(self, *, last: bool) -> None:
        self._model.set_requires_gradient_sync(last)
        self._model.set_reshard_after_backward(last)

    def first_moments(self) -> Mapping[str, Tensor]:
        """The shards put together."""
        state = self._optimizer.state
        return logical((_whole(state[p]["exp_avg"]), info) for p, info in self._infos.items())

    def state_bytes(self) -> int:
        """Of this rank's shards."""
        return bytes_of(self._optimizer.state)


def _whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()
