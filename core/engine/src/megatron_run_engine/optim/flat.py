"""The contract of an optimizer on flat buffers, which a ``ShardingStrategy`` divides over data-parallel ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from megatron_run.contracts import Optimizer
from megatron_run.contracts.topology import Replicas
from megatron_run_engine.optim.reducer import BucketReducer
from megatron_run_engine.optim.sharding import Shard
from megatron_run_engine.optim.state import iter_state, load_state, load_weights
from megatron_run_engine.optim.update import Update
from megatron_run_engine.optim.update_rules import find_rule
from megatron_run_engine.runtime.gradients import build_buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts import Chunk, ParamInfo, ReadState, StatePiece
    from megatron_run_engine.optim.sharding import ShardingStrategy
    from megatron_run_engine.optim.update_rules import UpdateOptions
    from megatron_run_engine.runtime.comm import ParallelGroup, Pending
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_engine.runtime.gradients import Bucket


class FlatOptimizer(Optimizer):
    """Gradients, parameters and masters in flat buckets, updated by the ranks that ``sharing`` selects.

    ``sharing`` makes a strategy for a group of ranks. It is called once for the data-parallel ranks, and once for those
    of them that hold the same experts.

    With ``overlap_param_gather`` updated parameters are gathered while the next step already runs, and each bucket is
    awaited when a segment reads it. Without it ``start_param_sync`` returns when all have arrived.
    """

    def __init__(
        self,
        context: BuildContext,
        options: UpdateOptions,
        sharing: Callable[[ParallelGroup], ShardingStrategy],
        *,
        overlap_param_gather: bool = False,
    ) -> None:
        self._groups, self._topology, self._device = context.groups, context.topology, context.device
        self._main, self._options = context.dtypes.main, options
        axes: tuple[Replicas, ...] = get_args(Replicas)
        self._peers = {axis: context.groups.peers(context.topology, axis) for axis in axes}
        self._sharing = {axis: sharing(peers) for axis, peers in self._peers.items()}
        self._overlap = overlap_param_gather
        self._rule = find_rule(options, self._topology.sizes.tensor)
        self._arriving: dict[Bucket, Pending] = {}

    def attach(self, chunks: Sequence[Chunk], infos: Sequence[dict[Parameter, ParamInfo]], grad_scale: float) -> None:
        """Lay out the buckets, move the parameters into flat storage and make the masters."""
        self._grad_scale = grad_scale
        dtype = self._main if self._options.grad_dtype == "main" else None
        self._buckets = build_buckets(
            infos,
            self._peers["data"].size,
            dtype,
            self._options.bucket_size,
            whole=self._rule.whole,
            expert_shards=self._peers["expert_data"].size,
        )
        self._shares = [self._share(bucket) for bucket in self._buckets]
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        # Within a chunk buckets lie in the order of its backward. Tied ones are the embedding's, which is read first.
        self._in_backward_order = sorted(self._shares, key=lambda share: _position(share.bucket), reverse=True)
        self._update = Update(self._shares, self._rule, self._options, self._device)
        self._reducer = BucketReducer(self._buckets, self._send, early=self._options.overlap_grad_reduce)
        self._reducer.start_step()
        self._counted = [grads for share in self._shares for grads in share.counted()]

    def zero_grad(self) -> None:
        """Zero the buckets and begin a new step of reductions."""
        for bucket in self._buckets:
            bucket.grad.zero_()
        self._reducer.start_step()

    def grad_ready(self, parameter: Parameter) -> None:
        """Note that the gradient of ``parameter`` is final, and send the buckets that are complete, in order."""
        self._reducer.arrived(parameter)

    def start_grad_sync(self, chunk: int) -> None:
        """Send the remaining buckets of ``chunk``."""
        self._reducer.flush(chunk)

    def finish_grad_sync(self) -> None:
        """Wait for every reduction, then sum partial gradients over their axis, where this rank updates them."""
        self._reducer.finish()
        for share in self._shares:
            axis = next(iter(share.bucket.infos.values())).partial_over
            if axis is not None:
                self._groups.sum_(share.bucket.grad[share.updated.start : share.updated.stop], axis)
            share.take_gradients()

    def unscale_(self, factor: Tensor) -> Tensor:
        """Multiply by ``factor`` and check for non-finite values, in one pass over each share."""
        found_inf = torch.zeros(1, device=self._device)
        grads = [share.grads for share in self._shares if share.updated]
        if grads:
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor)
        return self._groups.max_(found_inf, "world")

    def clip_(self, max_norm: float) -> Tensor:
        """Clip by the global norm. Each rank adds the squares of the gradients that it owns, in float64."""
        squares = torch.zeros(1, dtype=torch.float64, device=self._device)
        for grads in self._counted:
            squares += sum_of_squares(grads)
        norm = self._groups.sum_(squares, "world").sqrt()
        if max_norm > 0:
            coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0).to(self._main)
            for share in self._shares:
                share.grads.mul_(coefficient)
        return norm.float()

    def count_zeros(self) -> Tensor:
        """Return the number of zeros in the gradients of all logical tensors, without padding, fp32 [1]."""
        zeros = torch.zeros(1, dtype=torch.int64, device=self._device)  # fp32 would stop counting at 2**24
        for share in self._shares:
            for piece in share.pieces(share.owned):
                if piece.info.counted:
                    zeros += (share.grads[share.local(piece.world)] == 0).sum()
        return self._groups.sum_(zeros, "world").float()

    def step(self, lr: float, weight_decay: float) -> None:
        """Update the masters of this rank's shares and round them to the parameters' type."""
        self.ensure_ready(self._bucket_of)  # a gather that no segment has awaited would overwrite the update
        self._update.step(lr, weight_decay)
        for share in self._shares:
            share.give_values()

    def start_param_sync(self) -> None:
        """Start to gather the parameters that other ranks updated, first those that the next forward reads first."""
        for share in reversed(self._in_backward_order):
            self._arriving[share.bucket] = self._sharing[share.bucket.replicas].start_gather(share.values, share.bucket)
        if not self._overlap:
            self.ensure_ready(self._bucket_of)

    def ensure_ready(self, parameters: Iterable[Parameter]) -> None:
        """Wait for the buckets of ``parameters`` that are being gathered. Parameters in no bucket are always ready."""
        if not self._arriving:
            return
        for parameter in parameters:
            bucket = self._bucket_of.get(parameter)
            pending = None if bucket is None else self._arriving.pop(bucket, None)
            if pending is not None:
                pending.wait()

    def memory(self) -> Mapping[str, int]:
        """Return the bytes that this rank holds, by role."""
        shares, state = self._shares, self._update.state_bytes()
        return {
            "parameters": sum(share.values.nbytes for share in shares),
            "gradients": sum(bucket.grad.nbytes for bucket in self._buckets),
            "masters": sum(share.masters.nbytes for share in shares if share.has_masters),
            "main_gradients": sum(share.grads.nbytes for share in shares if share.has_main_grads),
            **({} if state is None else {"state": state}),
        }

    def iter_state(self) -> Iterator[StatePiece]:
        """Yield the state that this rank owns, as boxes of logical tensors. Of several copies one rank owns one."""
        return iter_state(self._update)

    def load_state(self, read: ReadState) -> None:
        """Read masters and state of the values that this rank updates, then gather the parameters on every rank."""
        self._load(partial(load_state, self._update, read))

    def load_weights(self, read: ReadState) -> None:
        """Read the masters only. The rule creates its state in the next step, as in a first step."""
        self._load(partial(load_weights, self._update, read))

    def _load(self, load: Callable[[], None]) -> None:
        self.ensure_ready(self._bucket_of)  # a gather in flight would overwrite what is loaded
        load()
        for share in self._shares:
            share.give_values()
        self.start_param_sync()
        self.ensure_ready(self._bucket_of)

    def _send(self, bucket: Bucket) -> Pending:
        if self._grad_scale != 1.0:  # before the sum: in 16 bits a sum over many ranks could overflow
            bucket.grad.mul_(self._grad_scale)
        return self._sharing[bucket.replicas].start_reduce(bucket)

    def _share(self, bucket: Bucket) -> Shard:
        rank = self._peers[bucket.replicas].index
        return Shard(bucket, self._sharing[bucket.replicas].updated(bucket), bucket.shares[rank], self._main)


def _position(bucket: Bucket) -> int:
    """Return when the next forward reads ``bucket``: tied parameters first, then chunk by chunk."""
    return -1 if bucket.chunk is None else bucket.chunk


#: Values whose squares are summed in fp32: few enough that rounding cannot change the clipping coefficient visibly.
_ROW = 256
#: Between these sums no square can have overflowed fp32, and squares that underflowed are negligible.
_LEAST, _MOST = 1e-20, 1e30


def sum_of_squares(flat: Tensor) -> Tensor:
    """Return the sum of the squares of ``flat`` [n], float64 []."""
    # On a CPU torch sums fp32 values far slower in float64 than in fp32. So sum rows in fp32 and the rows in float64,
    # unless the values are so large or so small that fp32 cannot hold their squares.
    if flat.device.type == "cpu" and flat.dtype == torch.float32:
        rows = len(flat) // _ROW * _ROW
        total = _exact(torch.linalg.vector_norm(flat[:rows].view(-1, _ROW), dim=1)) + _exact(flat[rows:])
        if _LEAST < total < _MOST:
            return total
    return _exact(flat)


def _exact(flat: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return norm.square()
