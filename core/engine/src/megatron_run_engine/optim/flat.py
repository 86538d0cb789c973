"""The contract of an optimizer on flat buffers; a ``ShardingStrategy`` divides them over data-parallel ranks."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from megatron_run.contracts import Optimizer
from megatron_run.contracts.topology import Replicas
from megatron_run_engine.optim.buckets import build_buckets
from megatron_run_engine.optim.gradients import gradients_of
from megatron_run_engine.optim.host_place import HostPlace
from megatron_run_engine.optim.place import Place
from megatron_run_engine.optim.reducer import BucketReducer
from megatron_run_engine.optim.sharding import Shard
from megatron_run_engine.optim.update import Update, iter_state, load_state, load_weights
from megatron_run_engine.optim.update_rules import find_rule
from megatron_run_engine.runtime.comm.gloo import is_gloo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.nn import Parameter

    from megatron_run.contracts import Chunk, ParamInfo, ReadState, StatePiece
    from megatron_run.contracts.topology import Axis
    from megatron_run_engine.optim.buckets import Bucket
    from megatron_run_engine.optim.sharding import ShardingStrategy
    from megatron_run_engine.optim.update_rules import UpdateOptions
    from megatron_run_engine.runtime.comm import ParallelGroup, Pending
    from megatron_run_engine.runtime.context import BuildContext


class FlatOptimizer(Optimizer):
    """Gradients, parameters and master weights in flat buckets; each rank updates what ``sharding`` assigns to it.

    ``sharding`` is called once for all data-parallel ranks, and once for those among them that hold the same experts.

    With ``overlap_param_gather``, updated parameters are gathered while the next step already runs, and each bucket is
    waited for when a segment first reads it. Otherwise ``start_param_sync`` returns once they have arrived.
    """

    scales_rows = True

    def __init__(
        self,
        context: BuildContext,
        options: UpdateOptions,
        sharding: Callable[[ParallelGroup], ShardingStrategy],
        *,
        overlap_param_gather: bool = False,
    ) -> None:
        self._groups, self._topology, self._device = context.groups, context.topology, context.device
        self._main, self._options, self._log = context.dtypes.main, options, context.log
        axes: tuple[Replicas, ...] = get_args(Replicas)
        self._peers = {axis: context.groups.parallel_group(context.topology, axis) for axis in axes}
        self._sharding = {axis: sharding(peers) for axis, peers in self._peers.items()}
        self._overlap = overlap_param_gather
        self._rule = find_rule(options, self._topology.sizes.tensor)
        self._arriving: dict[Bucket, Pending] = {}
        self._place = (HostPlace if options.state_on_host else Place)(self._device)

    def attach(self, chunks: Sequence[Chunk], infos: Sequence[dict[Parameter, ParamInfo]], grad_scale: float) -> None:
        """Lay out the buckets, move the parameters into flat storage and create the master weights."""
        self._grad_scale = grad_scale
        self._buckets = self._lay_out(infos)
        kept = [
            Shard(bucket, self._updated(bucket), self._owned(bucket), self._main, self._place.keep)
            for bucket in self._buckets
        ]
        self._shards = [*kept, *self._lent_shards()]
        self._followed = {shard.bucket: shard for shard in kept if _partial_over(shard.bucket) is None}
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        # Buckets of a chunk are in the order of its backward. Tied buckets (the embedding's) are read first of all.
        self._in_backward_order = sorted(kept, key=lambda shard: _position(shard.bucket), reverse=True)
        together = self._groups.parallel_group(self._topology, "tensor")
        # A rule of the user's may keep numbers of all tensors.
        parts = self._place.parts(self._shards, together=bool(self._rule.imported))
        self._updates = [
            Update(part, self._rule, self._options, self._place.device, self._warn, together) for part in parts
        ]
        self._reducer = BucketReducer(self._buckets, self._send, early=self._options.overlap_grad_reduce)
        self._reducer.start_step()
        self._gradients = gradients_of(self._shards, self._device)

    def zero_grad(self) -> None:
        """Clear the gradient buckets and forget what has arrived and what was sent."""
        self._place.begin_step()
        if found := [*(bucket.grad for bucket in self._buckets), *(shard.reduced for shard in self._lent_shards())]:
            torch._foreach_zero_(found)  # one launch for many of them
        self._gradients.arrived()
        self._reducer.start_step()

    def grad_ready(self, parameter: Parameter) -> None:
        """Send the complete buckets at the head of the chunk's sequence; a later one waits for those before it."""
        self._reducer.arrived(parameter)

    def start_grad_sync(self, chunk: int) -> None:
        """Send the remaining buckets of ``chunk``."""
        self._reducer.flush(chunk)

    def finish_grad_sync(self) -> None:
        """Wait for every reduction, then sum partial gradients over their axis, where this rank updates them."""
        self._reducer.finish()
        for shard in self._shards:
            axis = _partial_over(shard.bucket)
            if axis is not None:
                self._groups.sum_(shard.reduced, axis)
        self._place.take(self._shards)
        self._gradients.arrived()

    def unscale_(self, factor: Tensor) -> Tensor:
        """Multiply by ``factor`` and look for non-finite values, in one pass over each shard."""
        found_inf = self._gradients.unscale_(factor)
        # Over the world: a rank that skipped the update alone would train other weights from here on.
        return self._groups.max_(found_inf, "world")

    def clip_(self, max_norm: float) -> Tensor:
        """Clip by the global norm: each rank adds the squares of the values that it owns, in float64."""
        norm = self._groups.sum_(self._gradients.sum_of_squares(), "world").sqrt()
        if max_norm > 0:
            # Multiply even by 1: a branch on the norm would make the host wait for the device.
            # 1e-6 as in torch's clip_grad_norm_, so that a norm of 0 gives no division by 0.
            self._gradients.multiply_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm.float()

    def count_zeros(self) -> Tensor:
        """Number of zeros among the gradients of all logical tensors, padding excluded, fp32 [1]."""
        zeros = torch.zeros(1, dtype=torch.int64, device=self._device)  # fp32 would stop counting at 2**24
        for shard in self._shards:
            grads = self._gradients.multiplied(shard)  # what is unscaled may be too small for fp32
            for piece in shard.pieces(shard.owned):
                if piece.info.counted:
                    zeros += (grads[shard.local(piece.in_bucket)] == 0).sum()
        return self._groups.sum_(zeros, "world").float()

    def step(self, lr: float, weight_decay: float) -> None:
        """Update the master weights of this rank's shards and round them to parameters."""
        # A bucket that no segment has read since the last step may still be arriving, and would overwrite the update.
        self.finish_param_sync()
        self._place.step(self._updates, lr, weight_decay, self._gradients)

    def start_param_sync(self) -> None:
        """Start gathering what other ranks updated, in the order in which the next forward reads the buckets."""
        for shard in reversed(self._in_backward_order):
            bucket = shard.bucket
            self._arriving[bucket] = self._sharding[bucket.replicas].start_gather(shard.values, bucket)
        if not self._overlap:
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait for the buckets that are still arriving."""
        FlatOptimizer.ensure_ready(self, self._bucket_of)

    def ensure_ready(self, parameters: Iterable[Parameter]) -> None:
        """Wait for the buckets of ``parameters`` that are still arriving; parameters in no bucket are always ready."""
        if not self._arriving:
            return
        for parameter in parameters:
            bucket = self._bucket_of.get(parameter)
            pending = None if bucket is None else self._arriving.pop(bucket, None)
            if pending is not None:
                pending.wait()

    def memory(self) -> Mapping[str, int]:
        """Bytes held by this rank, by role."""
        shards, role = self._shards, self._place.role
        state = [update.state_bytes() for update in self._updates]
        return {
            "parameters": sum(shard.values_kept for shard in shards),
            "gradients": sum(shard.gradients_kept for shard in shards),
            role("masters"): sum(shard.masters.nbytes for shard in shards if shard.has_masters),
            role("main_gradients"): sum(shard.main_grads_kept for shard in shards),
            **({} if None in state else {role("state"): sum(filter(None, state))}),
        }

    def iter_state(self) -> Iterator[StatePiece]:
        """The state that this rank owns, in boxes of logical tensors; a tied or replicated copy comes once."""
        self._place.settle()
        return chain.from_iterable(map(iter_state, self._updates))

    def load_state(self, read: ReadState) -> None:
        """Read master weights and state of all that this rank updates, then bring the parameters to every rank."""
        self._load(partial(load_state, read=read))

    def load_weights(self, read: ReadState) -> None:
        """Read the master weights alone; the rule creates its state in the next step, as in the first one."""
        self._load(partial(load_weights, read=read))

    def _load(self, load: Callable[[Update], None]) -> None:
        self.finish_param_sync()  # a gather still in flight would overwrite the loaded values
        self._place.settle()
        for update in self._updates:
            load(update)
        self._place.give(self._shards)
        self.start_param_sync()
        self.finish_param_sync()

    def _lent_shards(self) -> Sequence[Shard]:
        """The shards of what is whole only while a segment reads it; here none."""
        return ()

    def _warn(self, message: str) -> None:
        if self._topology.rank == 0:  # the rule is the same on all
            self._log.warning("%s", message)

    def _send(self, bucket: Bucket) -> Pending:
        if self._grad_scale != 1.0:
            bucket.grad.mul_(self._grad_scale)  # before the sum, so that 16-bit gradients do not overflow in it
        pending = self._sharding[bucket.replicas].start_reduce(bucket)
        if (shard := self._followed.get(bucket)) is not None:
            self._place.follow(shard, pending, on_stream=self._awaited_on_stream(bucket, pending))
        return pending

    def _awaited_on_stream(self, bucket: Bucket, pending: Pending) -> bool:
        """Whether the host need not wait for ``pending``: a stream of the device can, or nothing is under way."""
        return pending.work is None or not is_gloo(self._peers[bucket.replicas].group)

    def _lay_out(self, infos: Sequence[dict[Parameter, ParamInfo]], *, lent: bool = False) -> list[Bucket]:
        """The buckets of parameters that are used together: those of a chunk, or of less."""
        return build_buckets(
            infos,
            self._peers["replicas"].size,
            self._main if self._options.grad_dtype == "main" else None,
            self._options.bucket_size,
            whole=self._rule.whole,
            expert_shards=self._peers["expert_replicas"].size,
            lent=lent,
        )

    def _updated(self, bucket: Bucket) -> range:
        return self._sharding[bucket.replicas].updated(bucket)

    def _owned(self, bucket: Bucket) -> range:
        return bucket.shares[self._peers[bucket.replicas].index]


def _partial_over(bucket: Bucket) -> Axis | None:
    """The axis over which the gradients of ``bucket`` are still to be summed once they are reduced."""
    return next(iter(bucket.infos.values())).partial_over


def _position(bucket: Bucket) -> int:
    """Position of ``bucket`` in the order in which the next forward reads them: tied parameters first, then chunks."""
    return -1 if bucket.chunk is None else bucket.chunk
