"""model=t5: an encoder and a decoder of different lengths (Raffel et al. 2020, and the changes of T5 1.1).

Three tensors cross between stages: the decoder's stream, the encoder's, and the tables of position biases.

Reading order: ``options``, here the cut into chunks, ``chunk`` (a stage's part), ``blocks`` (layers), ``positions``.

Legend: s decoder tokens, e encoder tokens, b micro batch, h hidden, n heads, k buckets, t tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.contracts import Boundary, Chunk, Model, PluginInfo
from megatron_run.errors import InputError
from megatron_run.errors.wording import nearest_divisors, nearest_multiples
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.nn import WORD, tie_to_word
from megatron_run_model_t5.chunk import WORDS, T5Chunk, T5Embedding, encoder_mask, encoder_tokens
from megatron_run_model_t5.options import T5Options

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Microbatch, ParallelLayers
    from megatron_run.contracts.data import Field
    from megatron_run.contracts.schedule import Place
    from megatron_run_engine.runtime import BuildContext

__all__ = ["T5", "T5Options"]


class T5(Model):
    """Builds the chunks of one rank. ``tokens`` and ``labels`` are the decoder's, ``encoder_tokens`` the encoder's."""

    predicts_next = False

    def __init__(self, context: BuildContext, options: T5Options) -> None:
        self._context, self._options = context, options
        self._length = options.encoder_length
        self._spec = options.spec(context.train.sequence_length, context.vocab_size)
        heads, ranks = options.num_heads, context.topology.sizes.tensor
        if heads % ranks:
            raise InputError(
                f"model.num_heads={heads} does not divide over parallel.tensor={ranks}",
                fix=f"set model.num_heads to {nearest_multiples(heads, ranks)}, "
                f"or parallel.tensor to {nearest_divisors(heads, ranks)}",
            )
        if self._length % context.sequence_shards:
            raise InputError(
                f"model.encoder_length={self._length} does not divide over parallel.tensor={context.sequence_shards}",
                why="with parallel.sequence each rank holds an equal part of the tokens between layers",
                fix=f"set it to {nearest_multiples(self._length, context.sequence_shards)}",
            )

    def build_chunk(
        self, position: int, layout: tuple[Place, ...], layers: ParallelLayers, shared: dict[str, Parameter]
    ) -> Chunk:
        """Build the layers of ``layout[position]``, with the embedding at the first and the head at the last."""
        context, spec, options, last = self._context, self._spec, self._options, len(layout) - 1
        words = output = None
        if position == 0:
            words = T5Embedding(context, spec, layers, options, self._length)
            if options.tie_embeddings:
                tie_to_word(words.word, 0, layout, shared)
        if position == last:
            tied, init = (shared.get(WORD), WORDS) if options.tie_embeddings else (None, spec.init)
            output = layers.output_layer(spec.vocab, spec.hidden, init=init, weight=tied)
            if options.tie_embeddings:
                tie_to_word(output, last, layout, shared)
        indices = layout[position].layers
        return T5Chunk(context, spec, layers, indices, options, self._length, words=words, output=output)

    def fields(self, position: int, layout: tuple[Place, ...]) -> tuple[str | Field, ...]:
        """Return both texts for the first position, labels for the last.

        Every position with layers needs the encoder's mask, where the data has one: it pads.
        """
        first = ("tokens", encoder_tokens(self._length)) if position == 0 else ()
        mask = encoder_mask(self._length)
        layers = (mask,) if layout[position].layers and mask.name in self._context.fields else ()
        last = ("labels", "loss_mask") if position == len(layout) - 1 else ()
        return (*first, *layers, *last)

    def boundary(self, microbatch: Microbatch, micro_batch_size: int, sequence_length: int) -> Boundary:
        """Return the shapes of the decoder's stream [s, b, h], the encoder's [e, b, h] and the biases [2, k, n].

        With sequence parallelism a rank holds s/t and e/t tokens.
        """
        shards, dtype, spec = self._context.sequence_shards, self._context.dtypes.param, self._spec
        encoder = Boundary((self._length // shards, micro_batch_size, spec.hidden), dtype)
        biases = Boundary((2, self._options.position_buckets, spec.heads), dtype)
        along = {"encoder": encoder, "biases": biases}
        return Boundary((sequence_length // shards, micro_batch_size, spec.hidden), dtype, along)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("model", "t5", options=T5Options)


@hookimpl
def megatron_run_create_model(context: BuildContext, options: T5Options) -> Model:
    """Make the model; ``options`` come with the vocabulary filled in."""
    return T5(context, options)
