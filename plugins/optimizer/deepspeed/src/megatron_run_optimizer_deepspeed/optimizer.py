"""The contract ``Optimizer``, implemented on DeepSpeed's partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_run.contracts import Optimizer
from megatron_run_engine.optim import build_buckets, sum_of_squares
from megatron_run_engine.runtime import main_grad
from megatron_run_optimizer_deepspeed.library import data_group, find_deepspeed
from megatron_run_optimizer_deepspeed.partitions import flat_groups, iter_state, load_state
from megatron_run_optimizer_deepspeed.rule import begin, make_rule, set_rates, state_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.nn import Parameter

    from megatron_run.contracts import Chunk, ParamInfo, ReadState, StatePiece
    from megatron_run_engine.optim import Bucket
    from megatron_run_engine.runtime import BuildContext
    from megatron_run_optimizer_deepspeed.partitions import FlatGroup, Shard
    from megatron_run_optimizer_deepspeed.rule import Options


class DeepSpeedZero(Optimizer):
    """Every rank updates its partition of the parameters; DeepSpeed holds, reduces and gathers them.

    The norm, found_inf and clipping follow the contract, over the partitions of all ranks. Communication starts after
    the last backward: DeepSpeed's partitions differ by stage, so tied and partial gradients must be summed before its
    reduction, and only then are they complete.
    """

    def __init__(self, context: BuildContext, options: Options) -> None:
        self._context, self._options = context, options
        self._groups, self._topology, self._device = context.groups, context.topology, context.device
        self._param = context.dtypes.param
        self._buckets: list[Bucket] = []
        self._flat: list[FlatGroup] = []
        self._shares: list[Shard] = []
        self._grads: list[Tensor] = []
        self._zero: Any = None

    def attach(self, chunks: Sequence[Chunk], infos: Sequence[dict[Parameter, ParamInfo]], grad_scale: float) -> None:
        """Make the gradient buffers, and hand the parameters to DeepSpeed. Collective except on the meta device."""
        replicas = self._topology.peers("replicas")
        ranks, rank = len(replicas), replicas.index(self._topology.rank)
        self._prescale = grad_scale * ranks  # DeepSpeed divides by the number of ranks
        self._buckets = build_buckets(infos, 1)
        self._flat = flat_groups(infos, self._options.update.factor, ranks, rank)
        self._shares = [share for group in self._flat for share in group.shares()]
        self._grads = [_gradient(share) for share in self._shares]
        if self._device.type == "meta":
            return
        peers = data_group(self._context)  # collective: a stage without parameters must take part too
        if self._flat:
            zero = find_deepspeed(self._device)
            zero.start_communication()
            members = [list(group.infos) for group in self._flat]
            rule = make_rule(self._flat, members, self._options, self._device)
            self._zero = zero.Zero(self._flat, rule, peers, self._options)

    def zero_grad(self) -> None:
        """Clear the buffers."""
        for bucket in self._buckets:
            bucket.grad.zero_()

    def grad_ready(self, parameter: Parameter) -> None:
        """No-op: reduction starts when all gradients are complete."""

    def start_grad_sync(self, chunk: int) -> None:
        """No-op: reduction starts when all chunks are complete."""

    def finish_grad_sync(self) -> None:
        """Sum partial gradients, then reduce all of them."""
        for bucket in self._buckets:
            if self._prescale != 1.0:
                bucket.grad.mul_(self._prescale)
            axis = next(iter(bucket.infos.values())).partial_over
            if axis is not None:
                self._groups.sum_(bucket.grad, axis)
        if self._zero is not None:
            self._zero.reduce()

    def unscale_(self, factor: Tensor) -> Tensor:
        """Multiply by ``factor`` and look for non-finite values, in one pass over this rank's partition."""
        found_inf = torch.zeros(1, device=self._device)
        if self._grads:
            torch._amp_foreach_non_finite_check_and_unscale_(self._grads, found_inf, factor)
        return self._groups.max_(found_inf, "world")

    def clip_(self, max_norm: float) -> Tensor:
        """Clip by the global norm: each rank adds the squares of its partition, in float64."""
        squares = torch.zeros(1, dtype=torch.float64, device=self._device)
        for share, grad in zip(self._shares, self._grads, strict=True):
            if share.info.counted:
                squares += sum_of_squares(grad)
        norm = self._groups.sum_(squares, "world").sqrt()
        if max_norm > 0:
            coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
            for grad in self._grads:
                grad.mul_(coefficient)
        return norm.float()

    def count_zeros(self) -> Tensor:
        """Zeros among the gradients of all logical tensors, padding left out, fp32 [1]."""
        zeros = torch.zeros(1, dtype=torch.int64, device=self._device)  # fp32 would stop counting at 2**24
        for share, grad in zip(self._shares, self._grads, strict=True):
            for piece in share.pieces() if share.info.counted else ():
                start = share.local.start
                zeros += (grad[piece.local.start - start : piece.local.stop - start] == 0).sum()
        return self._groups.sum_(zeros, "world").float()

    def step(self, lr: float, weight_decay: float) -> None:
        """Update this rank's partitions and gather those of all ranks."""
        if self._zero is not None:
            set_rates(self._zero.optimizer, lr, weight_decay)
            self._zero.update()

    def start_param_sync(self) -> None:
        """No-op: DeepSpeed has gathered the parameters in its step."""

    def ensure_ready(self, parameters: Iterable[Parameter]) -> None:
        """No-op: ``step`` returns with current parameters."""

    def finish_param_sync(self) -> None:
        """No-op, as above."""

    def memory(self) -> Mapping[str, int]:
        """Bytes that this rank holds, by role."""
        partitions = [torch.empty(group.partition, device="meta") for group in self._flat]
        return {
            "parameters": sum(group.nbytes for group in self._flat),
            "gradients": sum(bucket.grad.nbytes for bucket in self._buckets),
            "masters": 0 if self._param is torch.float32 else sum(partition.nbytes for partition in partitions),
            "main_gradients": 0,
            "state": state_bytes(self._flat, partitions, self._options),
        }

    def iter_state(self) -> Iterator[StatePiece]:
        """The contents of this rank's partitions as boxes of logical tensors; tied or replicated copies once."""
        for group, master in self._masters():
            yield from iter_state(group, master, self._zero.optimizer.state[master])

    def load_state(self, read: ReadState) -> None:
        """Read masters and state of this rank's partitions, then gather the parameters on every rank."""
        if self._zero is None:
            return
        for group, master in self._masters():
            load_state(group, master, self._zero.optimizer.state[master], read)
        self._zero.gather()

    def _masters(self) -> Iterator[tuple[FlatGroup, Tensor]]:
        if self._zero is not None:
            begin(self._zero.optimizer)  # PyTorch makes its state in the first step; a run may be saved before it
            yield from zip(self._flat, self._zero.masters, strict=True)


def _gradient(share: Shard) -> Tensor:
    """The accumulated gradient of ``share``, flat."""
    return main_grad(share.parameter).view(-1)[share.param.start : share.param.stop]
