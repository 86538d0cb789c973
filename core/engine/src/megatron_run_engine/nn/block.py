"""Pre-norm transformer blocks: attention, then a feed-forward network or a mixture of experts.

Legend: s sequence (s/t under sequence parallelism), b micro batch, h hidden.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_run.contracts import Segment
from megatron_run_engine.nn.attention import SelfAttention
from megatron_run_engine.nn.mlp import Mlp
from megatron_run_engine.nn.moe.layer import MixtureOfExperts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.nn import Parameter

    from megatron_run.contracts import Decoding, ParallelLayers
    from megatron_run_engine.nn.attention import Rotary
    from megatron_run_engine.nn.spec import ExpertSpec, TransformerSpec
    from megatron_run_engine.runtime.context import BuildContext

#: Names of tensors in a layer's environment.
Names = tuple[str, ...]

_READS_HOST = "the host reads how many tokens each expert gets, but for model.expert_pad_to_capacity=true"
_FOLLOWS = "its shapes follow how many tokens each expert gets, but for model.expert_pad_to_capacity=true"
_RECOMPUTES_A_PART = (
    "train.recompute=core_attn recomputes a part of it, and graphs recompute whole segments, as of attn"
)
_PACKED = "its work follows where the documents of a packed row begin"


class Block(nn.Module):
    """``x += dropout(attention(x))``, then ``x += dropout(feed-forward(x))``; each half begins with its norm.

    The attention reads the batch fields ``reads``.

    The segment runner runs the segments one by one and never calls the block as a whole: before each segment it waits
    for the parameters and positions the random streams. ``reports`` names the tensors, besides ``x``, that the segments
    leave in the environment for the chunk.
    """

    #: The part of segment "attn" that ``train.recompute`` can name.
    PARTS = ("core_attn",)

    reports: tuple[str, ...] = ()

    def __init__(
        self,
        layers: ParallelLayers,
        spec: TransformerSpec,
        layer: int,
        rotary: Rotary | None,
        reads: Names = (),
    ) -> None:
        super().__init__()
        self.layer, self.reads = layer, reads
        self.attention = SelfAttention(layers, spec, layer, rotary)
        self.dropout = layers.dropout(spec.dropout)
        self.draws = spec.dropout > 0
        self.why_eager = _PACKED if "documents" in reads else ""

    def recompute_core(self, streams: Sequence[torch.Generator]) -> None:
        """Recompute the core of the attention alone; it draws from ``streams``."""
        self.attention.recompute_core(streams if self.draws else ())
        self.why_eager = _RECOMPUTES_A_PART

    def attend(self, x: Tensor, *fields: Tensor | None, decoding: Decoding | None = None) -> Tensor:
        """Add the attention half: [s, b, h] -> [s, b, h]. ``fields`` are those that it ``reads``."""
        added: Tensor = self.dropout(self.attention(x, decoding, **dict(zip(self.reads, fields, strict=True))))
        return x + added

    def segments(self) -> tuple[Segment, ...]:
        """Both halves, in order."""
        params, draws = parameters_of(self.attention), self.draws
        attend = Segment(
            "attn",
            self.layer,
            0,
            self.attend,
            ("x", *self.reads),
            ("x",),
            params,
            self.why_eager,
            draws,
            parts=self.PARTS,
            decodes=True,
        )
        return attend, *self.feed_segments()

    @abstractmethod
    def feed_segments(self) -> tuple[Segment, ...]:
        """Segments of the feed-forward half, with indices from 1."""


class TransformerBlock(Block):
    """A block with one feed-forward network for all tokens."""

    def __init__(
        self,
        layers: ParallelLayers,
        spec: TransformerSpec,
        layer: int,
        rotary: Rotary | None,
        reads: Names = (),
    ) -> None:
        super().__init__(layers, spec, layer, rotary, reads)
        self.mlp = Mlp(layers, spec, spec.ffn, norm=layers.norm(spec.norm, spec.hidden, spec.norm_eps))

    def feed(self, x: Tensor) -> Tensor:
        """Add the feed-forward half: [s, b, h] -> [s, b, h]."""
        added: Tensor = self.dropout(self.mlp(x))
        return x + added

    def feed_segments(self) -> tuple[Segment, ...]:
        """One segment, "mlp"."""
        return (Segment("mlp", self.layer, 1, self.feed, ("x",), ("x",), parameters_of(self.mlp), draws=self.draws),)


class ExpertBlock(Block):
    """A block with a mixture of experts, in five segments.

    The cut follows what a CUDA graph can capture: only the shapes of ``moe_dispatch`` and ``moe_experts`` depend on the
    routing, so the other three can be captured, and with experts padded to their capacity all five.
    """

    def __init__(
        self,
        context: BuildContext,
        layers: ParallelLayers,
        spec: TransformerSpec,
        experts: ExpertSpec,
        layer: int,
        rotary: Rotary | None,
        reads: Names = (),
    ) -> None:
        super().__init__(layers, spec, layer, rotary, reads)
        self.moe = MixtureOfExperts(context, layers, spec, experts)
        self.reports = ("spread", *experts.loss_names)

    def combine(self, x: Tensor, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor, *y: Tensor) -> Tensor:
        """Add the feed-forward half: [s, b, h] -> [s, b, h]."""
        added: Tensor = self.dropout(self.moe.combine(x.shape[1], returned, weights, order, place, *y))
        return x + added

    def feed_segments(self) -> tuple[Segment, ...]:
        """Router, placement maps, dispatch, experts and combine."""
        moe, shared = self.moe, () if self.moe.shared is None else (self.moe.shared,)
        stream = ("y",) * len(shared)
        maps, carried = ("weights", "order", "place"), moe.dispatcher.carries
        reads, follows = (_READS_HOST, _FOLLOWS) if moe.dispatcher.dynamic else ("", "")
        routed = ("tokens", "weights", "chosen", "load", *moe.spec.loss_names, *stream)
        placed = ("order", "place", "counts", "spread")

        def segment(
            name: str, fn: Callable[..., object], inputs: Names, outputs: Names, *read: nn.Module, why: str = ""
        ) -> Segment:
            index = ("moe_router", "moe_preprocess", "moe_dispatch", "moe_experts", "moe_combine").index(name) + 1
            return Segment(
                name,
                self.layer,
                index,
                fn,
                inputs,
                outputs,
                parameters_of(*read),
                why,
                draws=self.draws and name == "moe_combine",
                differentiable=name != "moe_preprocess",  # maps are integers
                decodes=name == "moe_preprocess",
            )

        return (
            segment("moe_router", moe.route, ("x",), routed, moe.norm, moe.router),
            segment("moe_preprocess", moe.place, ("weights", "chosen", "load"), placed),
            segment(
                "moe_dispatch",
                moe.dispatcher.dispatch,
                ("tokens", *maps, "counts"),
                ("rows", *carried),
                why=reads,
            ),
            segment("moe_experts", moe.compute, ("rows", "weights", *carried), ("returned",), moe.experts, why=follows),
            segment("moe_combine", self.combine, ("x", "returned", *maps, *stream), ("x",), *shared),
        )


def make_block(
    context: BuildContext, layers: ParallelLayers, spec: TransformerSpec, layer: int, rotary: Rotary | None
) -> Block:
    """The block at index ``layer`` of the model: with experts where ``spec`` lists the layer, dense elsewhere."""
    block: Block
    reads = attention_fields(context, spec)
    if spec.experts is not None and layer in spec.experts.layers:
        block = ExpertBlock(context, layers, spec, spec.experts, layer, rotary, reads)
    else:
        block = TransformerBlock(layers, spec, layer, rotary, reads)
    train = context.train
    if isinstance(train.recompute, tuple) and "core_attn" in train.recompute and not train.recomputes("attn"):
        block.recompute_core(context.rng.streams)
    return block


def attention_fields(context: BuildContext, spec: TransformerSpec) -> Names:
    """The batch fields that attention reads, out of those that the data has."""
    wanted = ("documents", "positions") if spec.position == "rope" else ("documents",)
    return tuple(name for name in wanted if name in context.fields)


def parameters_of(*modules: nn.Module) -> tuple[Parameter, ...]:
    """All parameters of ``modules``, in order."""
    return tuple(parameter for module in modules for parameter in module.parameters())
