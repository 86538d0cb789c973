"""The network of model ``gpt``: its chunks from parallel layers.

Legend: s sequence, b micro batch, h hidden.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megatron_run.contracts import Boundary, Chunk, Model
from megatron_run_engine.nn import (
    WORD,
    AttentionMaker,
    DecoderChunk,
    Embedding,
    QkClip,
    RouterReports,
    SelfAttention,
    attention_fields,
    embedding_fields,
    tie_to_word,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.nn import Parameter

    from megatron_run.contracts import Microbatch, ParallelLayers
    from megatron_run.contracts.schedule import Place
    from megatron_run_engine.builtin.model.gpt_options import GptOptions
    from megatron_run_engine.nn import Attention, Rotary
    from megatron_run_engine.runtime.context import BuildContext


class Gpt(Model):
    """Builds the chunks of one rank, and ties the output layer to the word embedding."""

    computes_pieces = True

    def __init__(self, context: BuildContext, options: GptOptions) -> None:
        self._context, self._options = context, options
        self._spec = options.spec(context.train.sequence_length, context.vocab_size)
        self._routers: RouterReports | None = None
        if self._spec.experts is not None:
            # On every stage, also one without experts: metrics are all-reduced by position, so their names must agree.
            replicas = context.groups.parallel_group(context.topology, "replicas")
            tensor_ranks = context.topology.sizes.tensor
            self._routers = RouterReports(context.metrics, self._spec.experts, tensor_ranks, replicas)
            self.metric_names = ("lm", *self._spec.experts.loss_names)
        limit = options.attention.qk_clip
        self._clip = None if limit is None else QkClip(context, limit)

    def build_chunk(
        self, position: int, layout: tuple[Place, ...], layers: ParallelLayers, shared: dict[str, Parameter]
    ) -> Chunk:
        """Build the blocks of ``layout[position]``, with the embedding at the first and the head at the last."""
        spec, last = self._spec, len(layout) - 1
        embedding = output = None
        if position == 0:
            embedding = Embedding(self._context, spec, layers)
            if self.shares_words:
                tie_to_word(embedding.word, 0, layout, shared)
        if position == last:
            tied = shared.get(WORD) if self._options.tie_embeddings else None
            output = layers.output_layer(spec.vocab, spec.hidden, init=spec.init, weight=tied)
            if self._options.tie_embeddings:
                tie_to_word(output, last, layout, shared)
        return self.make_chunk(position, layout, layers, shared, embedding=embedding, output=output)

    @property
    def shares_words(self) -> bool:
        """Whether the last position holds the word embedding too, here as output layer."""
        return self._options.tie_embeddings

    def make_chunk(
        self,
        position: int,
        layout: tuple[Place, ...],
        layers: ParallelLayers,
        shared: dict[str, Parameter],  # for models that share more
        *,
        embedding: Embedding | None,
        output: nn.Module | None,
    ) -> Chunk:
        """The chunk at ``position``, of ``embedding`` and ``output`` where they lie; for models with more to put in."""
        return DecoderChunk(
            self._context,
            self._spec,
            layers,
            layout[position].layers,
            embedding=embedding,
            output=output,
            routers=self._routers,
            attention=self.attention_maker(layers),
        )

    def attention_maker(self, layers: ParallelLayers) -> AttentionMaker:
        """:meth:`make_attention` of ``layers``, whose scores are watched where they are clipped."""
        make = partial(self.make_attention, layers)
        return make if self._clip is None else self._clip.watching(make, layers)

    def make_attention(self, layers: ParallelLayers, layer: int, rotary: Rotary | None) -> Attention:
        """The attention of ``layer``; a model that differs from ``gpt`` in it overrides this."""
        return SelfAttention(self._context, layers, self._spec, layer, rotary)

    def fields(self, position: int, layout: tuple[Place, ...]) -> tuple[str, ...]:
        """Return ``tokens`` for the first position, ``labels`` and ``loss_mask`` for the last.

        Of packed data, every position with layers needs ``documents``, and ``positions`` go where they are encoded.
        """
        context, spec = self._context, self._spec
        first = ("tokens", *embedding_fields(context, spec)) if position == 0 else ()
        layers = attention_fields(context, spec) if layout[position].layers else ()
        last = ("labels", "loss_mask") if position == len(layout) - 1 else ()
        return (*first, *layers, *last)

    def boundary(self, microbatch: Microbatch, micro_batch_size: int, sequence_length: int) -> Boundary:
        """Return the shape of the residual stream, [s, b, h], or [s/t, b, h] with sequence parallelism."""
        length = sequence_length // self._context.sequence_shards
        return Boundary((length, micro_batch_size, self._spec.hidden), self._context.dtypes.param)

    def before_update(self, *, skipped: bool) -> None:
        """Move the biases that balance experts, by the choices of the step, and decide by its scores what shrinks."""
        if self._routers is not None:
            self._routers.balance(skipped=skipped)
        if self._clip is not None:
            self._clip.set_factors(skipped=skipped)
