"""The encoder of one pipeline stage: embedding, blocks in either order of normalisation, and the head.

Legend: s tokens of a row, b rows of a microbatch, h hidden, t tensor-parallel size. x is [s, b, h] between layers, or
[s/t, b, h] under sequence parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import ChunkOut, ParameterSpec, Segment
from megatron_run.errors import InputError
from megatron_run_engine.nn import (
    ForwardPass,
    Positions,
    SelfAttention,
    TransformerBlock,
    attention_fields,
    empty_parameter,
    follow_recompute,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_run.contracts import Decoding, Microbatch, ParallelLayers
    from megatron_run_engine.nn import TransformerSpec
    from megatron_run_engine.runtime import BuildContext
    from megatron_run_model_bert.heads import Head
    from megatron_run_model_bert.options import BertOptions

#: The field that says of which kind each token is, such as of sentence A or B.
TOKEN_TYPES = "token_types"


class TokenTypes(nn.Module):
    """Adds a learned vector for each token's type; without the field all are of type 0."""

    def __init__(self, context: BuildContext, spec: TransformerSpec, types: int) -> None:
        super().__init__()
        split = context.sequence_shards > 1
        self.shard = context.topology.tensor_rank if split else 0
        self.weight = empty_parameter(context, types, spec.hidden)
        self.parameter_specs = {"weight": ParameterSpec(spec.init, partial_over="tensor" if split else None)}

    def forward(self, x: Tensor, types: Tensor | None) -> Tensor:
        """[s/t, b, h], and types [b, s] of all ranks' tokens -> [s/t, b, h]."""
        if types is None:
            return x + self.weight[0]
        first = self.shard * len(x)
        return x + F.embedding(types[:, first : first + len(x)].t(), self.weight)  # [b, s] -> [s, b, h]


class EncoderEmbedding(nn.Module):
    """Words, positions and token types; a norm where blocks have none before them; dropout.

    A sample of several choices holds their rows one after the other: [b/c, c*s] -> [b, s].
    """

    def __init__(
        self, context: BuildContext, spec: TransformerSpec, layers: ParallelLayers, options: BertOptions
    ) -> None:
        super().__init__()
        self.choices, self.longest = options.choices, spec.sequence_length
        self.word = layers.vocab_embedding(spec.vocab, spec.hidden, init=spec.init)
        self.position = Positions(context, spec)
        self.token_type = TokenTypes(context, spec, options.token_types)
        self.norm = layers.norm(spec.norm, spec.hidden, spec.norm_eps) if spec.norm_placement == "sum" else None
        self.dropout = layers.dropout(spec.dropout)
        self.draws = spec.dropout > 0
        self.reads = first_fields(context)

    def forward(self, tokens: Tensor, *fields: Tensor | None) -> Tensor:
        """Tokens [b/c, c*s], and the fields that it ``reads`` -> [s/t, b, h].

        Raises :class:`InputError` when a row is longer than the model has positions.
        """
        rows = tokens.unflatten(1, (self.choices, -1)).flatten(0, 1)  # [b, s]
        if rows.shape[1] > self.longest:
            raise InputError(
                f"a row of {rows.shape[1]} tokens is longer than the model's {self.longest} positions",
                fix="lower train.sequence_length, or raise model.max_positions",
            )
        given = {
            name: field.reshape(rows.shape) for name, field in zip(self.reads, fields, strict=True) if field is not None
        }
        x = self.position(self.word(rows), None, given.get("positions"))
        x = self.token_type(x, given.get(TOKEN_TYPES))
        result: Tensor = self.dropout(x if self.norm is None else self.norm(x))
        return result

    def segment(self) -> Segment:
        """The whole layer as one segment, layer -1 of the model."""
        read = tuple(self.parameters())
        return Segment("embedding", -1, 0, self, ("tokens", *self.reads), ("x",), read, draws=self.draws)


def first_fields(context: BuildContext) -> tuple[str, ...]:
    """The fields that the embedding reads besides ``tokens``, out of those that the data has."""
    return tuple(name for name in (TOKEN_TYPES, "positions") if name in context.fields)


class PostNormBlock(TransformerBlock):
    """``x = norm(x + dropout(attention(x)))``, then the same with the feed-forward network: figure 7 (a).

    (Shoeybi et al. 2019; the order of Vaswani et al. 2017 and of the first BERT.) Figure 7 (b) is
    :class:`TransformerBlock`, whose norms come first.
    """

    def attend(self, x: Tensor, *fields: Tensor | None, decoding: Decoding | None = None) -> Tensor:
        """The attention half: [s, b, h] -> [s, b, h]."""
        assert self.attention_post_norm is not None
        found = self.attention(x, decoding, **dict(zip(self.reads, fields, strict=True)))
        result: Tensor = self.attention_post_norm(x + self.addition(found, None))
        return result

    def feed(self, x: Tensor, *attended: Tensor) -> Tensor:
        """The feed-forward half: [s, b, h] -> [s, b, h]."""
        assert self.feed_post_norm is not None
        result: Tensor = self.feed_post_norm(x + self.addition(self.mlp(x), None))
        return result


class EncoderChunk(nn.Module):
    """Runs ``embedding`` if it has one, the blocks ``indices``, and ``head`` if it has one.

    Blocks are named by their global index, so that parameter names do not depend on the layout. Every token sees all
    others: nothing can be kept of earlier ones.
    """

    def __init__(
        self,
        context: BuildContext,
        spec: TransformerSpec,
        layers: ParallelLayers,
        indices: range,
        *,
        embedding: EncoderEmbedding | None = None,
        head: Head | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        blocks = {str(index): _block(context, layers, spec, index) for index in indices}
        self.layers = nn.ModuleDict(blocks)
        self.head = head
        self._runner, self._forward_pass = context.segments, ForwardPass(layers, context.train)
        self._reads, finish = attention_fields(context, spec), self._forward_pass.finish

        # Built once: graph capture recognises a segment by its identity.
        self._first = () if embedding is None else (finish(embedding.segment()),)
        self._blocks = tuple(tuple(map(finish, block.segments())) for block in blocks.values())
        to_logits, to_losses = ((), ()) if head is None else head.segments()
        finished = {id(segment): finish(segment) for segment in (*to_logits, *to_losses)}
        self._logits = tuple(finished[id(segment)] for segment in to_logits)
        self._losses = tuple(finished[id(segment)] for segment in to_losses)

    def segments(self) -> Sequence[Segment]:
        """Every segment in forward order."""
        return (*self._first, *(segment for block in self._blocks for segment in block), *self._losses)

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        """Run forward: x [s, b, h], or None at the first position -> x for the next, losses, or the head's logits.

        The last position gives losses when the microbatch has labels and logits when it has none.
        """
        fields = microbatch.fields
        with self._forward_pass():
            if self.embedding is not None:
                given: dict[str, Any] = {name: fields.get(name) for name in ("tokens", *self.embedding.reads)}
                x = self._run(self._first, microbatch, given)["x"]
            for segments in self._blocks:
                read = {name: fields.get(name) for name in self._reads}
                x = self._run(segments, microbatch, {"x": x, **read})["x"]
            if self.head is None:
                return ChunkOut(x)
            if "labels" not in fields:
                return ChunkOut(None, logits=self._run(self._logits, microbatch, {"x": x, **fields})["logits"])
            found = self._run(self._losses, microbatch, {"x": x, **fields})
            return ChunkOut(None, losses={name: (found[name], found[f"{name}_weight"]) for name in self.head.losses})

    def _run(
        self, segments: Sequence[Segment], microbatch: Microbatch, environment: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        self._runner.run(segments, microbatch, environment)
        return environment


def _block(context: BuildContext, layers: ParallelLayers, spec: TransformerSpec, index: int) -> TransformerBlock:
    reads = attention_fields(context, spec)
    made = PostNormBlock if spec.norm_placement == "sum" else TransformerBlock
    block = made(layers, spec, SelfAttention(context, layers, spec, index, None), reads)
    follow_recompute(context, block)
    return block
