"""Operations that pass over a large tensor once, as kernels in Triton, for devices that wait for their memory.

On a CUDA device every operation of torch is a pass over memory. Where several of them follow each other on a tensor as
large as the logits, one kernel takes their place. The operations are torch's, registered in ``torch.library``, so that
captured and compiled graphs contain them; under fake tensors they say shapes and run nothing. Layers ask :func:`fuses`
and keep their own code for everything else: CPUs, float64, a machine that lacks Triton or the C compiler that it needs.

- :mod:`loss_rows` : statistics of rows of logits, and their gradient
- :mod:`column_sums` : the sum of a matrix's rows, added to an fp32 total
- :mod:`norm_rows` : the backward of layer norm and root-mean-square norm
- :mod:`gelu_rows` : GeLU, and its gradient with that of a bias
- :mod:`gate`, :mod:`rotation` : SwiGLU, and rotary positions
- :mod:`joined_heads` : the gradients of queries, keys and values, joined
- :mod:`group_kernels` : weight gradients of experts, on CUDA; the operation is ``nn.device_groups``'

The kernels themselves, in the modules whose names end in ``_kernels``, import Triton, and are imported when the first
of them runs. With ``TRITON_INTERPRET=1`` in the environment, Triton's interpreter, where Triton is installed, runs them
on CPU tensors too, slowly.
"""

from megatron_run_engine.nn.fused.availability import fuses, has_kernels, triton_lack, triton_runs
from megatron_run_engine.nn.fused.column_sums import add_column_sums
from megatron_run_engine.nn.fused.gate import fused_swiglu, fused_swiglu_gradient
from megatron_run_engine.nn.fused.gelu_rows import fused_gelu, fused_gelu_gradient
from megatron_run_engine.nn.fused.joined_heads import join_heads, split_heads
from megatron_run_engine.nn.fused.loss_rows import row_statistics, write_gradient
from megatron_run_engine.nn.fused.norm_rows import WIDEST_NORM, norm_gradients
from megatron_run_engine.nn.fused.rotation import rotated

__all__ = [
    "WIDEST_NORM",
    "add_column_sums",
    "fused_gelu",
    "fused_gelu_gradient",
    "fused_swiglu",
    "fused_swiglu_gradient",
    "fuses",
    "has_kernels",
    "join_heads",
    "norm_gradients",
    "rotated",
    "row_statistics",
    "split_heads",
    "triton_lack",
    "triton_runs",
    "write_gradient",
]
