"""Groups ``model.attention`` and ``model.norm``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_run.contracts import NormKind
from megatron_run.contracts.meaning import OF_TRAINING
from megatron_run.contracts.option_groups import Group
from megatron_run_engine.builtin.model.rope_options import Pattern, spread
from megatron_run_engine.nn.spec import QkNorm


class AttentionOptions(Group):
    """Windows, scales and norms of attention."""

    window: int | None = Field(
        None, ge=1, description="tokens that a query sees, itself the last of them; unset: all before it"
    )
    window_pattern: Pattern = Field(
        (), description="1: the layer has the window, 0: it sees all; repeated; unset: all have it"
    )
    scale: float | None = Field(None, gt=0, description="on products of query and key; unset: 1/sqrt(head size)")
    softcap: float | None = Field(None, gt=0, description="cap c of these products x: c tanh(x/c); unset: none")
    qk_norm: QkNorm = Field("none", description="norm of queries and keys: of each head, or over the full projection")
    qk_clip: Annotated[float | None, OF_TRAINING] = Field(
        None,
        gt=0,
        description="after an update, shrink queries and keys of heads whose largest score was above it; unset: never",
    )
    qkv_bias: bool | None = Field(None, description="biases of query, key and value; unset: as model.bias")

    def explicit(self, layers: int, head_size: int, *, bias: bool) -> dict[str, Any]:
        """The options with the values that unset ones mean, for ``layers`` with heads of that size."""
        pattern = spread(self.window_pattern, layers) if self.window else (0,) * layers
        return self.model_dump() | {
            "window": self.window if any(pattern) else None,
            "window_pattern": pattern,
            "scale": self.scale or head_size**-0.5,
            "qkv_bias": bias if self.qkv_bias is None else self.qkv_bias,
        }


class NormOptions(Group):
    """The norms of the residual stream."""

    kind: NormKind = Field("layernorm", description="of the residual stream; _1p: times 1 + weight, as in Gemma")
    eps: float = Field(1e-5, gt=0, description="added to the variance")
    placement: Literal["pre", "post", "sandwich"] = Field(
        "pre", description="pre: before attention and feed-forward; post: on what they add; sandwich: both"
    )
