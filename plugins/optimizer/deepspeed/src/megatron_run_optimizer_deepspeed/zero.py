"""DeepSpeed's ZeRO optimizer, driven by our training loop instead of DeepSpeed's. Only this module imports DeepSpeed.

The used part of ``DeepSpeedZeroOptimizer`` (stages 1 and 2; Rajbhandari et al. 2020) is its flat groups and fp32
partitions, bucketed reduction, update and gather. Its gradient hooks are left out, since our engine accumulates
gradients, as are its loss scaler, norm and clipping, which the contract defines.
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

from megatron_run_engine.runtime import main_grad
from megatron_run_optimizer_deepspeed.partitions import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run_optimizer_deepspeed.partitions import FlatGroup
    from megatron_run_optimizer_deepspeed.rule import Options


class Zero(DeepSpeedZeroOptimizer):  # type: ignore[misc]  # DeepSpeed has no types
    """The partitions of one rank, one for each of ``groups``, which ``rule`` updates.

    Gradients are read and written in ``main_grad``. DeepSpeed would use ``parameter.grad``, which must have the
    parameter's type and so cannot be fp32 for a 16-bit parameter.
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
            reduce_bucket_size=min(options.reduce_bucket_size, held),  # DeepSpeed allocates a buffer of this size
            use_multi_rank_bucket_allreduce=options.use_multi_rank_bucket_allreduce,
            gradient_accumulation_dtype=torch.float32,
            communication_data_type=torch.float32,
            check_grad_overflow=False,
        )

    @property
    def nccl_start_alignment_factor(self) -> int:
        """The multiple to which each rank's partition is padded, in values."""
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
        """Average the gradients over the data-parallel ranks, in place for the values that this rank updates."""
        # Aliases: DeepSpeed repoints the ``.data`` of these tensors at its bucket, and main_grad must stay in place.
        self._reducing = {parameter: main_grad(parameter).detach() for parameter in self._parameters}
        self.reduce_gradients(pipeline_parallel=True)
        self._reducing = {}

    def update(self) -> None:
        """Update this rank's partitions from the reduced gradients, and gather those of all ranks."""
        with _deprecations_ignored():
            self.step()

    def gather(self) -> None:
        """Copy the masters to the parameters of every rank."""
        with _deprecations_ignored():
            self.update_lp_params()

    def initialize_optimizer_states(self) -> None:
        """Make fp32 parameters their own masters, before anything refers to DeepSpeed's copy of them."""
        rank = dist.get_rank(self.dp_process_group)
        for master, partitions in zip(self.masters, self.parallel_partitioned_bit16_groups, strict=True):
            if partitions[rank].dtype == master.dtype:
                master.data = partitions[rank].detach()
        super().initialize_optimizer_states()

    def create_gradient_handling_hooks(self) -> None:
        """No-op: our engine accumulates gradients, and they are reduced once a step."""

    def get_gradient_for_reduction(self, param: Parameter) -> Tensor | None:
        """The gradient of ``param`` during a reduction, unless it was dropped."""
        return self._reducing.get(param)

    get_param_gradient_attribute = get_gradient_for_reduction

    def clear_grad_attribute(self, param: Parameter) -> None:
        """Drop a gradient that other ranks use (stage 2)."""
        del self._reducing[param]

    def copy_grads_in_partition(self, param: Parameter, group_idx: int | None = None) -> None:
        """Copy a reduced gradient back to ``main_grad``, since the bucket is reused."""
        self._reducing[param] = main_grad(param).copy_(self._reducing[param])

    def scaled_global_norm(self, norm_type: int = 2) -> float:
        """Zero, without DeepSpeed's reduction for the norm: our engine has clipped the gradients already."""
        return 0.0

    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """No separate fp32 buffer for gradients of 16-bit parameters: they are fp32 already."""
        return False


def start_communication() -> None:
    """Let DeepSpeed communicate through the existing process groups."""
    if deepspeed.comm.is_initialized():
        return
    # DeepSpeed would try to compile each of its operators, and build one for inference: report none as compatible.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    try:
        deepspeed.comm.init_distributed(dist.get_backend(), dist_init_required=False, verbose=False)
    finally:
        del deepspeed.ops.__compatible_ops__  # later callers evaluate it again


@contextmanager
def _deprecations_ignored() -> Iterator[None]:
    """Silence the warning about a function that torch 2.13 deprecates and DeepSpeed calls: users cannot act on it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor` is deprecated", FutureWarning)
        yield


def device_type() -> str:
    """The kind of device that DeepSpeed uses in this process: ``cpu`` or ``cuda``."""
    name: str = get_accelerator().device_name()
    return name
