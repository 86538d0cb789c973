"""The part of encoder and decoder on one pipeline stage.

Legend: s decoder tokens, e encoder tokens, b micro batch, h hidden, n heads, k buckets, t tensor-parallel size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_run.contracts import ChunkOut, Field, Init, ParameterSpec, Segment
from megatron_run.errors import InputError
from megatron_run_engine.nn import DecoderChunk, empty_parameter
from megatron_run_model_t5.blocks import DecoderBlock, EncoderBlock
from megatron_run_model_t5.positions import PositionBias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_run.contracts import Microbatch, ParallelLayers
    from megatron_run_engine.nn import TransformerSpec
    from megatron_run_engine.runtime import BuildContext
    from megatron_run_model_t5.options import T5Options


#: Initial values of the embedding: a stream begins with values of the size that norms give them.
WORDS = Init("normal", 1.0)
#: What crosses between stages beside the decoder's stream.
BESIDE = ("encoder", "biases")


def encoder_tokens(length: int) -> Field:
    """The field that the encoder reads."""
    return Field("encoder_tokens", shape=(length,))


def encoder_mask(length: int) -> Field:
    """1 where the encoder reads a token, 0 at padding; data whose rows are full has no such field."""
    return Field("encoder_mask", shape=(length,))


class T5Embedding(nn.Module):
    """Embeds both texts by one matrix, and holds the tables of position biases.

    The decoder's stream waits for its first layer through all stages of the encoder. That costs messages the
    decoder's length, and saves a third copy of the matrix on the stage where the decoder begins.
    """

    def __init__(
        self, context: BuildContext, spec: TransformerSpec, layers: ParallelLayers, options: T5Options, length: int
    ) -> None:
        super().__init__()
        self.word = layers.vocab_embedding(spec.vocab, spec.hidden, init=WORDS)
        self.encoder_bias = empty_parameter(context, options.position_buckets, spec.heads)
        self.decoder_bias = empty_parameter(context, options.position_buckets, spec.heads)
        self.parameter_specs = dict.fromkeys(("encoder_bias", "decoder_bias"), ParameterSpec(spec.init))
        self.dropout = layers.dropout(spec.dropout)
        self.draws, self.longest = spec.dropout > 0, (length, spec.sequence_length)

    def forward(self, encoder_tokens: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [b, e] and [b, s] -> [e, b, h], [s, b, h] (or parts of 1/t), and both tables [2, k, n].

        Raises :class:`InputError` when one of the texts is longer than the model is built for.
        """
        keys = ("model.encoder_length", "train.sequence_length")
        for given, longest, key in zip((encoder_tokens, tokens), self.longest, keys, strict=True):
            if given.shape[1] > longest:
                raise InputError(
                    f"a sequence of {given.shape[1]} tokens is longer than the model's {longest}", fix=f"raise {key}"
                )
        encoder, x = (self.dropout(self.word(given)) for given in (encoder_tokens, tokens))
        return encoder, x, torch.stack((self.encoder_bias, self.decoder_bias))

    def segment(self) -> Segment:
        """The whole layer as one segment, layer -1 of the model."""
        inputs, outputs = ("encoder_tokens", "tokens"), ("encoder", "x", "biases")
        return Segment("embedding", -1, 0, self, inputs, outputs, tuple(self.parameters()), draws=self.draws)


class T5Chunk(DecoderChunk):
    """Runs ``embedding`` if it has one, the layers ``indices`` of encoder and decoder, and the head if it has one.

    Head and losses are those of every decoder. Blocks are named by their global index.
    """

    def __init__(
        self,
        context: BuildContext,
        spec: TransformerSpec,
        layers: ParallelLayers,
        indices: range,
        options: T5Options,
        length: int,
        *,
        words: T5Embedding | None = None,
        output: nn.Module | None = None,
    ) -> None:
        super().__init__(context, spec, layers, range(0), output=output)
        border, relu = options.first_decoder_layer, options.activation == "relu"
        blocks = {
            index: EncoderBlock(layers, spec, index, relu=relu, last=index == border - 1)
            if index < border
            else DecoderBlock(layers, spec, index, relu=relu)
            for index in indices
        }
        self.caches = False  # an encoder reads whole texts
        self.embedding = words  # type: ignore[assignment]  # of two texts
        self.layers = nn.ModuleDict({str(index): block for index, block in blocks.items()})
        self.bias = PositionBias(context, options, length)
        self._encodes, self._decodes = any(i < border for i in indices), any(i >= border for i in indices)
        self._shards = context.sequence_shards
        # Built once: graph capture recognises a segment by its identity.
        self._first = () if words is None else (self.finish(words.segment()),)
        self._layers = tuple(tuple(map(self.finish, block.segments())) for block in blocks.values())

    def segments(self) -> Sequence[Segment]:
        """Every segment in forward order."""
        return (*self._first, *(segment for layer in self._layers for segment in layer), *super().segments())

    def forward(
        self,
        x: Tensor | None,
        microbatch: Microbatch,
        *,
        encoder: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> ChunkOut:
        """Run forward: the decoder's stream x [s, b, h], the encoder's [e, b, h] and the tables of biases [2, k, n].

        None of them at the first position; all three go to the next. The last one gives losses when the microbatch has
        labels and logits [s, b, p/t] when it has none.
        """
        streams: dict[str, Any] = {"x": x, "encoder": encoder, "biases": biases}
        with self._forward_pass():
            if self._first:
                streams = {name: microbatch.fields[name] for name in ("encoder_tokens", "tokens")}
                self.runner.run(self._first, microbatch, streams)
            seen = self._biases(streams, microbatch.fields.get("encoder_mask"))
            for segments in self._layers:
                environment = {"x": streams["x"], "encoder": streams["encoder"], **seen}
                self.runner.run(segments, microbatch, environment)
                streams |= {"x": environment["x"], "encoder": environment["encoder"]}
            if self.output is not None:
                return self.run_head(streams["x"], microbatch, [])
            return ChunkOut(streams["x"], beside={name: streams[name] for name in BESIDE})

    def _biases(self, streams: dict[str, Any], mask: Tensor | None) -> dict[str, Any]:
        """The sums that layers here add to their products, made once for all of them."""
        found: dict[str, Any] = {}
        if not self._layers:
            return found
        encoder, decoder = self.bias.own(streams["biases"])
        if self._encodes:
            length = len(streams["encoder"]) * self._shards
            found["encoder_bias"] = self.bias.of_encoder(encoder, length, mask)
        if self._decodes:
            found["x_bias"] = self.bias.of_decoder(decoder, len(streams["x"]) * self._shards)
            found["cross_bias"] = None if mask is None else self.bias.across(mask, decoder)
        return found
