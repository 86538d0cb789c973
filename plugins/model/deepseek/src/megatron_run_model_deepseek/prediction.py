"""Multi-token prediction (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2): further tokens, one predictor after the other.

The predictor at depth k joins the stream of the depth before with the embedding of the token k places ahead, sends the
result through a block of its own, and predicts the token behind that with the model's output layer. It is a loss alone:
texts are generated without it.

Legend: s sequence, b micro batch, h hidden, c bounds of a row's documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_run.contracts import ChunkOut, Segment
from megatron_run_engine.nn import (
    Attention,
    DecoderChunk,
    ReplicatedLinear,
    Rotary,
    attention_fields,
    make_block,
    parameters_of,
)
from megatron_run_model_deepseek.later_tokens import LaterTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_run.contracts import Microbatch, ParallelLayers
    from megatron_run_engine.nn import TransformerSpec
    from megatron_run_engine.runtime import BuildContext

#: The name under which the loss of the first depth is reported, without its coefficient.
MTP_LOSS = "model/mtp_loss"


def loss_name(depth: int) -> str:
    """The name of the loss at ``depth``, from 1: each depth counts tokens of its own."""
    return MTP_LOSS if depth == 1 else f"{MTP_LOSS}_{depth}"


class Predictor(nn.Module):
    """Depth ``depth``, from 1: the token ``depth`` places behind the next. ``embedding`` embeds, ``output`` classifies.

    The block has experts where the model's last one has. Its layer's number lies behind the head's.
    """

    def __init__(
        self,
        context: BuildContext,
        layers: ParallelLayers,
        spec: TransformerSpec,
        depth: int,
        attention: Callable[[int, Rotary | None], Attention],
        rotary: Rotary,
        embedding: nn.Module,
        output: nn.Module,
    ) -> None:
        super().__init__()
        self.depth, self.layer, self.by_token = depth, spec.layers + depth, context.train.loss_mean == "token"
        self._later = LaterTokens(context)
        self.reads = attention_fields(context, spec)
        self.stream_norm = layers.norm(spec.norm, spec.hidden, spec.norm_eps)
        self.token_norm = layers.norm(spec.norm, spec.hidden, spec.norm_eps)
        self.join = ReplicatedLinear(context, 2 * spec.hidden, spec.hidden, spec.init)
        self.block = make_block(context, layers, predictor_spec(spec, self.layer), attention(self.layer, rotary))
        self.final_norm = layers.norm(spec.norm, spec.hidden, spec.norm_eps)
        self.cross_entropy = layers.cross_entropy(spec.vocab, spec.label_smoothing)
        self.scale = spec.embedding_scale
        self._embedding, self._output = (embedding,), (output,)  # in tuples: not its children

    def enter(self, x: Tensor, labels: Tensor) -> Tensor:
        """The stream [s, b, h] and labels [b, s] -> the block's input [s, b, h]."""
        words = self._embedding[0](self._later.ahead(labels, self.depth - 1)) * self.scale
        joined: Tensor = self.join(torch.cat((self.stream_norm(x), self.token_norm(words)), dim=-1))
        return joined

    def loss(
        self,
        logits: Callable[[Tensor], Tensor],
        x: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        *documents: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The loss of the tokens that count, from the block's output [s, b, h], and its weight: scalars.

        A sum and their number with ``train.loss_mean=token``, else what this rank adds to their mean, times the ranks
        that add to it, and 1. ``logits`` makes [s, b, h] after a norm to the model's logits; the bounds of packed rows
        are ``documents`` [b, c].
        """
        losses = self.cross_entropy(logits(self.final_norm(x)), self._later.ahead(labels, self.depth))  # [s, b]
        counts = self._later.counted(loss_mask, self.depth, *documents).t().to(losses.dtype)
        total, weight = (losses * counts).sum(), counts.sum()
        return (total, weight) if self.by_token else (self._later.mean(total, weight), torch.ones_like(weight))

    def segments(self, logits: Callable[[Tensor], Tensor]) -> tuple[Segment, ...]:
        """Entrance, the block's segments, and the loss; ``logits`` as for :meth:`loss`."""
        documents = ("documents",) if "documents" in self.reads else ()
        entering = (self.stream_norm, self.token_norm, self.join, *self._embedding)
        inputs = ("x", "labels", "loss_mask", *documents)
        return (
            Segment("mtp_input", self.layer, 6, self.enter, ("x", "labels"), ("x",), parameters_of(*entering)),
            *self.block.segments(),
            Segment(
                "mtp_loss",
                self.layer,
                7,
                partial(self.loss, logits),
                inputs,
                ("mtp", "mtp_weight"),
                parameters_of(self.final_norm, *self._output),
            ),
        )


def predictor_spec(spec: TransformerSpec, layer: int) -> TransformerSpec:
    """``spec`` for a further ``layer`` of the kind of the last one."""
    experts = spec.experts
    mixed = experts is not None and spec.layers - 1 in experts.layers
    return replace(spec, experts=replace(experts, layers=frozenset({layer})) if experts and mixed else None)


class PredictingChunk(DecoderChunk):
    """The last chunk of a model with predictors; ``coefficient`` weighs the mean of their losses."""

    def __init__(
        self,
        *arguments: Any,
        word_embedding: nn.Module,
        predictors: Sequence[Predictor],
        coefficient: float,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self.word, self.coefficient = word_embedding, coefficient
        self.predictors = nn.ModuleDict({str(each.depth): each for each in predictors})
        self._predicting = [
            (tuple(map(self.finish, each.segments(self.logits))), each.block.reports) for each in predictors
        ]
        self.watch_routers(each.block for each in predictors)

    def segments(self) -> Sequence[Segment]:
        """Every segment in forward order."""
        return (*super().segments(), *(segment for segments, _ in self._predicting for segment in segments))

    def run_head(self, x: Tensor, microbatch: Microbatch, reported: list[dict[str, Tensor]]) -> ChunkOut:
        """As of every decoder, and in training the losses of the predictors."""
        out = super().run_head(x, microbatch, reported)
        if not microbatch.train or "labels" not in microbatch.fields:
            return out
        share, found = self.coefficient / len(self._predicting), dict(out.losses)
        for depth, (segments, names) in enumerate(self._predicting, 1):
            environment: dict[str, Any] = {**dict.fromkeys(("documents", "positions")), **microbatch.fields, "x": x}
            self.runner.run(segments, microbatch, environment)
            x = environment["x"]
            reported += [{name: environment[name] for name in names}] if names else []
            found[loss_name(depth)] = (share * environment["mtp"], share * environment["mtp_weight"])
        return replace(out, losses=found)
