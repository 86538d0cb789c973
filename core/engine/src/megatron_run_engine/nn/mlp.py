"""The feed-forward half of a block.

Its activation is GeLU (:mod:`.gelu`), squared ReLU (So et al. 2021), or a gated linear unit with SiLU or
GeLU on its gate (Shazeer 2020).

Legend: s sequence, b micro batch, h hidden, f feed-forward size, t tensor-parallel size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import LinearPart, LinearSpec
from megatron_run_engine.nn.fused import fused_swiglu, fused_swiglu_gradient, fuses
from megatron_run_engine.nn.gelu import Gelu
from megatron_run_engine.nn.grouped import GroupedLayer
from megatron_run_engine.nn.linear import LinearLayer
from megatron_run_engine.nn.spec import GATED

if TYPE_CHECKING:
    from megatron_run.contracts import ParallelLayers
    from megatron_run_engine.nn.gelu import Activation as Function
    from megatron_run_engine.nn.spec import Activation, TransformerSpec


class Mlp(nn.Module):
    """``output(activation(input(x)))``; with a gate the input layer computes gate and up in one product."""

    def __init__(
        self,
        layers: ParallelLayers,
        spec: TransformerSpec,
        ffn: int,
        key: str = "model.ffn_size",
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        parts = input_parts(spec.activation, ffn, key)
        self.input = layers.column_linear(LinearSpec(spec.hidden, parts, spec.init, bias=spec.bias), norm)
        self.activation = activation(spec.activation)
        self.output = layers.row_linear(LinearSpec(ffn, spec.hidden, spec.residual_init, bias=spec.bias))

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        inner = self.input(x, self.activation) if self.activates else self.activation(self.input(x))  # [s, b, f/t]
        result: Tensor = self.output(inner)
        return result

    @property
    def activates(self) -> bool:
        """Whether the input layer takes the activation, as it declares; layers of other factories need not."""
        return isinstance(self.input, LinearLayer) and self.input.activates


def input_parts(name: Activation, ffn: int, key: str) -> tuple[LinearPart, ...]:
    """The input layer's matrices, ``ffn`` features each; errors name the configuration ``key`` that sets them."""
    names = ("gate", "up") if name in GATED else ("up",)
    return tuple(LinearPart(part, ffn, key) for part in names)


def activation(name: Activation) -> Function:
    """The function between the two layers; a gated one halves the number of features."""
    if name == "swiglu":
        return swiglu
    if name == "relu_squared":
        return lambda x: F.relu(x).square()
    approximate = "tanh" if name.endswith("_tanh") else "none"
    if name in GATED:
        return partial(geglu, approximate=approximate)
    return Gelu(tanh=approximate == "tanh")


def geglu(x: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up``: [*, 2f] holding gate then up -> [*, f]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up``: [*, 2f] holding gate then up -> [*, f]."""
    if not torch.is_grad_enabled() and not fuses(x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    result: Tensor = _Swiglu.apply(x)  # type: ignore[no-untyped-call]  # torch's
    return result


class _Swiglu(torch.autograd.Function):
    """Saves x alone, and writes both halves of its gradient into one buffer, which avoids a concatenation.

    On a GPU each of forward and backward is one kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        if fuses(x):
            return fused_swiglu(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,), (grad,) = ctx.saved_tensors, grads
        if fuses(x):
            return fused_swiglu_gradient(grad, x)
        gate, up = x.chunk(2, dim=-1)
        result = torch.empty_like(x)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return result


class Experts(nn.Module):
    """``output(activation(input(rows)))``, each expert on its own rows, inside a tensor-parallel region."""

    def __init__(self, layers: ParallelLayers, spec: TransformerSpec, experts: range, ffn: int) -> None:
        super().__init__()
        parts = input_parts(spec.activation, ffn, "model.experts.ffn_size")
        self.input = layers.expert_column_linear(experts, LinearSpec(spec.hidden, parts, spec.init, bias=spec.bias))
        self.activation = activation(spec.activation)
        output = LinearSpec(ffn, spec.hidden, spec.residual_init, bias=spec.bias)
        self.output = layers.expert_row_linear(experts, output)

    @property
    def takes_device_counts(self) -> bool:
        """Whether counts may stay on the device, as both layers declare; layers of other factories need not."""
        layers = self.input, self.output
        return all(isinstance(layer, GroupedLayer) and layer.takes_device_counts for layer in layers)

    def forward(self, rows: Tensor, counts: Tensor | int) -> Tensor:
        """Rows [m, h] sorted by expert, ``counts`` per expert -> [m, h], a partial sum over tensor-parallel ranks."""
        inner = self.activation(self.input(rows, counts))  # [m, f/t]
        result: Tensor = self.output(inner, counts)
        return result
