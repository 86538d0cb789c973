"""DeepSpeed's ZeRO optimizer, driven by the kernel instead of by DeepSpeed's engine. Only this module imports it.

Of ``DeepSpeedZeroOptimizer`` (stages 1 and 2; Rajbhandari et al. 2020) are used: its flat groups and fp32 partitions,
its bucketed reduction, its update and its gather. Left out are its hooks on gradients, since the kernel accumulates
them, and its loss scaler, norm and clipping, since the contract has its own.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import deepspeed.comm
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.timer import NoopTimer

from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_optimizer_deepspeed.partitions import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run_optimizer_deepspeed.options import Options
    from megatron_run_optimizer_deepspeed.partitions import FlatGroup


class Zero(DeepSpeedZeroOptimizer):  # type: ignore[misc]  # DeepSpeed has no types
    """The partitions of one rank, of which ``rule`` updates one for each of ``groups``.

    Gradients are read and written in ``main_grad``: ``parameter.grad``, which DeepSpeed would use, cannot be fp32 where
    the parameter is not.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        rule: torch.optim.Optimizer,
        peers: dist.ProcessGroup,
        options: Options,
    ) -> None:
        self._parameters = [parameter for group in groups for parameter in group.infos]
        self._reducing: dict[Parameter, Tensor] = {}
        held = sum(parameter.numel() for parameter in self._parameters)
        super().__init__(
            rule,
            {parameter: info.name for group in groups for parameter, info in group.infos.items()},
            NoopTimer(),
            {},
            verbose=False,
            dp_process_group=peers,
            partition_grads=options.stage == 2,
            reduce_bucket_size=min(options.reduce_bucket_size, held),  # a buffer of that size is allocated
            use_multi_rank_bucket_allreduce=options.use_multi_rank_bucket_allreduce,
            gradient_accumulation_dtype=torch.float32,
            communication_data_type=torch.float32,
            check_grad_overflow=False,
        )

    @property
    def nccl_start_alignment_factor(self) -> int:
        """The multiple to which the partition of each rank is padded, in values."""
        return ALIGNMENT

    @nccl_start_alignment_factor.setter
    def nccl_start_alignment_factor(self, factor: int) -> None:
        assert ALIGNMENT % factor == 0, f"DeepSpeed aligns to {factor} values"

    @property
    def masters(self) -> list[Tensor]:
        """This rank's fp32 partition of each group, flat."""
        partitions: list[Tensor] = self.single_partition_of_fp32_groups
        return partitions

    def reduce(self) -> None:
        """Average the gradients over the data-parallel ranks, in place where this rank updates the parameter."""
        # Aliases, since DeepSpeed points the data of what it is given at its bucket.
        self._reducing = {parameter: main_grad(parameter).detach() for parameter in self._parameters}
        self.reduce_gradients(pipeline_parallel=True)
        self._reducing = {}

    def update(self) -> None:
        """Update this rank's partitions from the reduced gradients, and gather everybody's."""
        with _deprecations_ignored():
            self.step()

    def gather(self) -> None:
        """Bring the masters to the parameters of every rank."""
        with _deprecations_ignored():
            self.update_lp_params()

    def initialize_optimizer_states(self) -> None:
        """Let the masters be the parameters where those are fp32, before anything else refers to DeepSpeed's copy."""
        rank = dist.get_rank(self.dp_process_group)
        for master, partitions in zip(self.masters, self.parallel_partitioned_bit16_groups, strict=True):
            if partitions[rank].dtype == master.dtype:
                master.data = partitions[rank].detach()
        super().initialize_optimizer_states()

    def create_gradient_handling_hooks(self) -> None:
        """Make none: gradients are accumulated by the kernel and reduced once a step."""

    def get_gradient_for_reduction(self, param: Parameter) -> Tensor | None:
        """What is left of the gradients that are being reduced."""
        return self._reducing.get(param)

    get_param_gradient_attribute = get_gradient_for_reduction

    def clear_grad_attribute(self, param: Parameter) -> None:
        """Forget a gradient that is other ranks' to use (stage 2)."""
        del self._reducing[param]

    def copy_grads_in_partition(self, param: Parameter, group_idx: int | None = None) -> None:
        """Bring a reduced gradient back from the bucket, which is used again, to where it came from."""
        self._reducing[param] = main_grad(param).copy_(self._reducing[param])

    def scaled_global_norm(self, norm_type: int = 2) -> float:
        """What DeepSpeed would clip by, at the price of a reduction: the gradients are clipped already."""
        return 0.0

    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """Whether gradients of 16-bit parameters go to an fp32 buffer of their own: they are fp32 already."""
        return False


def start_communication() -> None:
    """Let DeepSpeed talk through the process groups that exist."""
    if deepspeed.comm.is_initialized():
        return
    # DeepSpeed would try the compiler for each of its operators, and build one that is for inference. It finds none.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    try:
        deepspeed.comm.init_distributed(dist.get_backend(), dist_init_required=False, verbose=False)
    finally:
        del deepspeed.ops.__compatible_ops__  # who asks for it later looks again


@contextmanager
def _deprecations_ignored() -> Iterator[None]:
    """DeepSpeed gathers by a name that torch 2.13 has deprecated; the user cannot do anything about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor` is deprecated", FutureWarning)
        yield


def device_type() -> str:
    """The kind of device that DeepSpeed works on in this process: ``cpu`` or ``cuda``."""
    name: str = get_accelerator().device_name()
    return name
