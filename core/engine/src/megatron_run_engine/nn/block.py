"""Transformer blocks: attention, then a feed-forward network or a mixture of experts, and norms around them.

Legend: s sequence (s/t under sequence parallelism), b micro batch, h hidden.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron_run.contracts import Segment
from megatron_run_engine.nn.mlp import Mlp
from megatron_run_engine.nn.moe.layer import MixtureOfExperts
from megatron_run_engine.nn.norm import norm_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch.nn import Parameter

    from megatron_run.contracts import Decoding, ParallelLayers
    from megatron_run_engine.nn.attention import Attention
    from megatron_run_engine.nn.spec import ExpertSpec, TransformerSpec
    from megatron_run_engine.runtime.context import BuildContext

#: Names of tensors in a layer's environment.
Names = tuple[str, ...]

#: Why an expert layer's segments that follow the routing run eagerly, for what the dispatcher says.
_READS_HOST = "the host reads how many tokens each expert gets, since {}; not with model.experts.pad_to_capacity=true"
_FOLLOWS = "its shapes follow how many tokens each expert gets, since {}; not with model.experts.pad_to_capacity=true"
_RECOMPUTES_A_PART = (
    "train.recompute=core_attn recomputes a part of it, and graphs recompute whole segments, as of attn"
)
_PACKED = "its work follows where the documents of a packed row begin"


class Block(nn.Module):
    """``x += dropout(attention(x))``, then ``x += dropout(feed-forward(x))``.

    Each half begins with its norm, ends with one before it is added (``norm_placement=post``), or both (``sandwich``);
    a derived block may end on the sum instead (``sum``).
    With a parallel residual both halves read the same x, and what the attention adds waits in ``added``. The attention
    reads the batch fields ``reads``.

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
        attention: Attention,
        reads: Names = (),
    ) -> None:
        super().__init__()
        self.layer, self.reads, self.attention = attention.layer, reads, attention
        ends = spec.norm_placement != "pre"
        self.attention_post_norm = norm_of(layers, spec) if ends else None
        self.feed_post_norm = norm_of(layers, spec) if ends else None
        self.dropout = layers.dropout(spec.dropout)
        self.scale, self.parallel = spec.residual_scale, spec.parallel_residual
        self.draws = spec.dropout > 0
        # Without a causal order the core takes a mask, whose shape follows from nothing that the host reads.
        self.why_eager = attention.why_eager or (_PACKED if spec.causal and "documents" in reads else "")

    def recompute_core(self, streams: Sequence[torch.Generator]) -> None:
        """Recompute the core of the attention alone; it draws from ``streams``."""
        self.attention.recompute_core(streams if self.draws else ())
        self.why_eager = _RECOMPUTES_A_PART

    def attend(self, x: Tensor, *fields: Tensor | None, decoding: Decoding | None = None) -> Tensor:
        """Add the attention half: [s, b, h] -> [s, b, h]. ``fields`` are those that it ``reads``.

        With a parallel residual the result is what is to be added.
        """
        found = self.attention(x, decoding, **dict(zip(self.reads, fields, strict=True)))
        added = self.addition(found, self.attention_post_norm)
        return added if self.parallel else x + added

    def addition(self, found: Tensor, norm: nn.Module | None) -> Tensor:
        """The sum that a half adds to the residual stream, from what it ``found``: [s, b, h] -> [s, b, h]."""
        added: Tensor = self.dropout(found if norm is None else norm(found))
        return added if self.scale == 1 else added * self.scale

    def segments(self) -> tuple[Segment, ...]:
        """Both halves, in order."""
        params, draws = parameters_of(self.attention, self.attention_post_norm), self.draws or drops(self.attention)
        attend = Segment(
            "attn",
            self.layer,
            0,
            self.attend,
            ("x", *self.reads),
            ("added" if self.parallel else "x",),
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
        attention: Attention,
        reads: Names = (),
    ) -> None:
        super().__init__(layers, spec, attention, reads)
        norm = norm_of(layers, spec) if spec.norms_first else None
        self.mlp = Mlp(layers, spec, spec.ffn, norm=norm)

    def feed(self, x: Tensor, *attended: Tensor) -> Tensor:
        """Add the feed-forward half, and what the attention ``attended`` beside it: [s, b, h] -> [s, b, h]."""
        added = self.addition(self.mlp(x), self.feed_post_norm)
        return sum(attended, x) + added

    def feed_segments(self) -> tuple[Segment, ...]:
        """One segment, "mlp"."""
        inputs, params = ("x", "added") if self.parallel else ("x",), parameters_of(self.mlp, self.feed_post_norm)
        draws = self.draws or drops(self.mlp)
        return (Segment("mlp", self.layer, 1, self.feed, inputs, ("x",), params, draws=draws),)


class ExpertBlock(Block):
    """A block with a mixture of experts, in five segments.

    The cut follows what a CUDA graph can capture: only the shapes of ``moe_dispatch`` and ``moe_experts`` depend on the
    routing, so the other three can always be captured. All five can where the dispatcher's shapes do not: with experts
    padded to their capacity, or all on one rank and without one.
    """

    def __init__(
        self,
        context: BuildContext,
        layers: ParallelLayers,
        spec: TransformerSpec,
        experts: ExpertSpec,
        attention: Attention,
        reads: Names = (),
    ) -> None:
        super().__init__(layers, spec, attention, reads)
        self.moe = MixtureOfExperts(context, layers, spec, experts)
        self._placed = ("spread",) if self.moe.router.expert_bias is None else ("spread", "choices")
        self.reports = (*self._placed, *experts.loss_names)

    def combine(self, x: Tensor, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor, *y: Tensor) -> Tensor:
        """Add the feed-forward half: [s, b, h] -> [s, b, h]."""
        found = self.moe.combine(x.shape[1], returned, weights, order, place, *y)
        return x + self.addition(found, self.feed_post_norm)

    def feed_segments(self) -> tuple[Segment, ...]:
        """Router, placement maps, dispatch, experts and combine."""
        moe, shared = self.moe, () if self.moe.shared is None else (self.moe.shared,)
        stream = ("y",) * len(shared)
        maps, carried = ("weights", "order", "place"), moe.dispatcher.carries
        why = moe.dispatcher.why_dynamic
        reads, follows = (text.format(why) if why else "" for text in (_READS_HOST, _FOLLOWS))
        routed = ("tokens", "weights", "chosen", "load", *moe.spec.loss_names, *stream)
        placed = ("order", "place", "counts", *self._placed)

        def segment(
            name: str, fn: Callable[..., object], inputs: Names, outputs: Names, *read: nn.Module | None, why: str = ""
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
                draws=drops(*read) or (self.draws and name == "moe_combine"),
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
            segment(
                "moe_combine", self.combine, ("x", "returned", *maps, *stream), ("x",), *shared, self.feed_post_norm
            ),
        )


def make_block(context: BuildContext, layers: ParallelLayers, spec: TransformerSpec, attention: Attention) -> Block:
    """The block around ``attention``: with experts where ``spec`` lists its layer, dense elsewhere."""
    block: Block
    reads = attention_fields(context, spec)
    if spec.experts is not None and attention.layer in spec.experts.layers:
        block = ExpertBlock(context, layers, spec, spec.experts, attention, reads)
    else:
        block = TransformerBlock(layers, spec, attention, reads)
    follow_recompute(context, block)
    return block


def follow_recompute(context: BuildContext, block: Block) -> None:
    """Let ``block`` recompute the core of its attention where ``train.recompute`` names that alone."""
    train = context.train
    if isinstance(train.recompute, tuple) and "core_attn" in train.recompute and not train.recomputes("attn"):
        block.recompute_core(context.rng.streams)


def attention_fields(context: BuildContext, spec: TransformerSpec) -> Names:
    """The batch fields that attention reads, out of those that the data has."""
    wanted = ("documents", "positions") if spec.position == "rope" else ("documents",)
    return tuple(name for name in wanted if name in context.fields)


def drops(*modules: nn.Module | None) -> bool:
    """Whether one of ``modules`` has a dropout: layers may bring some besides the model's, as adapters do."""
    inner = (layer for module in modules if module is not None for layer in module.modules())
    return any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in inner)


def parameters_of(*modules: nn.Module | None) -> tuple[Parameter, ...]:
    """All parameters of those ``modules`` that there are, in order."""
    return tuple(parameter for module in modules if module is not None for parameter in module.parameters())
