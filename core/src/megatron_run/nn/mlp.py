"""The feed-forward half of a block: GeLU (Hendrycks and Gimpel 2016) or SwiGLU (Shazeer 2020).

Legend: s sequence, b micro batch, h hidden, f feed-forward size, t tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import LinearPart

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron_run.contracts import ParallelLayers
    from megatron_run.nn.spec import Activation, TransformerSpec


class Mlp(nn.Module):
    """``output(activation(input(norm(x))))``; under SwiGLU the input layer computes gate and up at once."""

    def __init__(self, layers: ParallelLayers, spec: TransformerSpec) -> None:
        super().__init__()
        names = ("gate", "up") if spec.activation == "swiglu" else ("up",)
        parts = tuple(LinearPart(name, spec.ffn, "model.ffn_size") for name in names)
        norm = layers.norm(spec.norm, spec.hidden, spec.norm_eps)
        self.input = layers.column_linear(spec.hidden, parts, bias=spec.bias, init=spec.init, norm=norm)
        self.activation = _activation(spec.activation)
        self.output = layers.row_linear(spec.ffn, spec.hidden, bias=spec.bias, init=spec.residual_init)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        result: Tensor = self.output(self.activation(self.input(x)))  # inside: [s, b, f/t]
        return result


def _activation(name: Activation) -> Callable[[Tensor], Tensor]:
    if name == "swiglu":
        return swiglu
    if name == "gelu_tanh":
        return lambda x: F.gelu(x, approximate="tanh")
    return F.gelu


def swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up``: [*, 2f] holding gate then up -> [*, f]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
