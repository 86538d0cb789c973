"""A pre-norm transformer block.

Legend: s sequence, b micro batch, h hidden.
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
    """``x += dropout(attention(norm(x)))``, then ``x += dropout(mlp(norm(x)))``.

    It is run through its segments, never called as a whole: between them the kernel makes parameters ready and
    positions random numbers.
    """

    def __init__(self, layers: ParallelLayers, spec: TransformerSpec, layer: int, rotary: Rotary | None) -> None:
        super().__init__()
        self.layer = layer
        self.attention_norm = layers.norm(spec.norm, spec.hidden)
        self.attention = SelfAttention(layers, spec, layer, rotary)
        self.mlp_norm = layers.norm(spec.norm, spec.hidden)
        self.mlp = Mlp(layers, spec)
        self.dropout = layers.dropout(spec.dropout)

    def attend(self, x: Tensor) -> Tensor:
        """Add the attention half: [s, b, h] -> [s, b, h]."""
        added: Tensor = self.dropout(self.attention(self.attention_norm(x)))
        return x + added

    def feed(self, x: Tensor) -> Tensor:
        """Add the feed-forward half: [s, b, h] -> [s, b, h]."""
        added: Tensor = self.dropout(self.mlp(self.mlp_norm(x)))
        return x + added

    def segments(self, why_eager: str = "") -> tuple[Segment, ...]:
        """The two halves, in order; ``why_eager`` says why they must not be captured."""
        attend, feed = parameters_of(self.attention_norm, self.attention), parameters_of(self.mlp_norm, self.mlp)
        return (
            Segment("attn", self.layer, 0, self.attend, ("x",), ("x",), attend, why_eager),
            Segment("mlp", self.layer, 1, self.feed, ("x",), ("x",), feed, why_eager),
        )


def parameters_of(*modules: nn.Module) -> tuple[Parameter, ...]:
    """All parameters of ``modules``, in order."""
    return tuple(parameter for module in modules for parameter in module.parameters())
