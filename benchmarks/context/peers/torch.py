"""torch's context parallelism: what its public function says on a CPU, and its ring with the CPU's kernel put in.

``context_parallel`` hands its ring the kernels of GPUs alone. The ring itself takes a kernel as an argument, so that
its messages, its balance and its merging can be timed here, inside the same layers as ours.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import AttentionCore, AttentionShape, StackedLayers

NAME = "torch's ring, CPU kernel put in"
PUBLIC = "torch's context_parallel()"
_ATEN = torch.ops.aten


def refusal() -> str:
    """What torch's ``context_parallel`` raises for attention on a CPU; empty where it runs. Collective."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel  # half a second of imports

    heads = torch.zeros(1, 1, 8 * dist.get_world_size(), 4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    try:
        with context_parallel(mesh, buffers=[heads], buffer_seq_dims=[2]):
            F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    except (NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class TorchRing(StackedLayers):
    """The layers of ``base``, whose attention is torch's ring over all ranks."""

    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        """Attention without dropout, to as many key heads as there are query heads."""
        assert not dropout
        assert shape.heads == shape.kv_heads
        return _Core()


class _Core(nn.Module, AttentionCore):
    pieces = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Three of [s/C, b, n, d] -> [s/C, b, n*d]."""
        heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
        out: Tensor = _Ring.apply(*heads)  # type: ignore[no-untyped-call]  # torch's
        return out.permute(2, 0, 1, 3).flatten(2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        kernel: Any = _ATEN._scaled_dot_product_flash_attention_for_cpu
        group = dist.distributed_c10d._get_default_group()
        out, logsum = ring._templated_ring_attention(group, 2, kernel, query, key, value, is_causal=True)
        ctx.save_for_backward(query, key, value, out, logsum)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        kernel: Any = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        group = dist.distributed_c10d._get_default_group()
        query, key, value, out, logsum = ctx.saved_tensors
        return ring._templated_ring_attention_backward(
            group, 2, kernel, grads[0], "grad_out", query, key, value, out, logsum, is_causal=True, dropout_p=0.0
        )
