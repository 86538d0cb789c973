"""A pre-norm transformer block.

Legend: s sequence (s/t under sequence parallelism), b micro batch, h hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_run.contracts import Segment
from megatron_run.nn.attention import SelfAttention
from megatron_run.nn.mlp import Mlp

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import ParallelLayers
    from megatron_run.nn.rotary import Rotary
    from megatron_run.nn.spec import TransformerSpec


class TransformerBlock(nn.Module):
    """``x += dropout(attention(x))``, then ``x += dropout(mlp(x))``; each half begins with its norm.

    It is run through its segments, never called as a whole: between them the kernel makes parameters ready and
    positions random numbers.
    """

    def __init__(self, layers: ParallelLayers, spec: TransformerSpec, layer: int, rotary: Rotary | None) -> None:
        super().__init__()
        self.layer = layer
        self.attention = SelfAttention(layers, spec, layer, rotary)
        self.mlp = Mlp(layers, spec)
        self.dropout = layers.dropout(spec.dropout)

    def attend(self, x: Tensor) -> Tensor:
        """Add the attention half: [s, b, h] -> [s, b, h]."""
        added: Tensor = self.dropout(self.attention(x))
        return x + added

    def feed(self, x: Tensor) -> Tensor:
        """Add the feed-forward half: [s, b, h] -> [s, b, h]."""
        added: Tensor = self.dropout(self.mlp(x))
        return x + added

    def segments(self, why_eager: str = "") -> tuple[Segment, ...]:
        """The two halves, in order; ``why_eager`` says why they must not be captured."""
        attend, feed = parameters_of(self.attention), parameters_of(self.mlp)
        return (
            Segment("attn", self.layer, 0, self.attend, ("x",), ("x",), attend, why_eager),
            Segment("mlp", self.layer, 1, self.feed, ("x",), ("x",), feed, why_eager),
        )


def parameters_of(*modules: nn.Module) -> tuple[Parameter, ...]:
    """All parameters of ``modules``, in order."""
    return tuple(parameter for module in modules for parameter in module.parameters())
