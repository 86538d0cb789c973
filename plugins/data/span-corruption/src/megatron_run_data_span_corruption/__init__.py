"""data=span-corruption: what T5 learns from, out of Megatron's indexed datasets. ``spans`` makes the samples."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import Field

from megatron_run.contracts import DataSource, PluginInfo, Split
from megatron_run.contracts.data import LABELS, LOSS_MASK, TOKENS
from megatron_run.contracts.data import Field as BatchField
from megatron_run.errors import InputError
from megatron_run.hookspecs import hookimpl
from megatron_run_data_span_corruption.spans import LEAST, Corruption, Spans, SpanVocabulary, span_vocabulary
from megatron_run_engine.data import SPLITS, PreparedTextOptions, PreparedTexts, check_split
from megatron_run_engine.data.indexed_files import IndexedReader

if TYPE_CHECKING:
    from numpy.typing import NDArray


class SpanOptions(PreparedTextOptions):
    """The keys of section ``data`` when it uses span-corruption."""

    encoder_length: int = Field(512, ge=LEAST + 2, description="tokens that the encoder reads, as the model's")
    corrupted: float = Field(0.15, gt=0, lt=1, description="share of the tokens that are taken out")
    span: float = Field(3.0, ge=1, description="tokens that are taken out together, in the mean")


class SpanCorruption(PreparedTexts):
    """Texts without some runs, and the runs."""

    def __init__(self, options: SpanOptions) -> None:
        super().__init__(options, "span-corruption")
        self._encoder_length = options.encoder_length
        self._corruption = Corruption(options.corrupted, options.span)

    @cached_property
    def _length(self) -> int:
        """The tokens of a text."""
        return self._corruption.longest(self._encoder_length)

    @cached_property
    def _vocabulary(self) -> SpanVocabulary:
        return span_vocabulary(self.tokenizer, self._corruption.counts(self._length)[1])

    @property
    def vocab_size(self) -> int:
        """The ids of the tokenizer, and of the special tokens that it lacks."""
        return self._vocabulary.size

    @property
    def fields(self) -> tuple[BatchField, ...]:
        """The decoder's tokens as those of every sample, and the encoder's, with 0 in a mask at its padding."""
        shape = (self._encoder_length,)
        encoder = (BatchField(name, shape=shape) for name in ("encoder_tokens", "encoder_mask"))
        return (TOKENS, LABELS, LOSS_MASK, *encoder)

    def dataset(self, split: Split, sequence_length: int, seed: int) -> Spans:
        """Open ``split`` in the order of the files, as it is in the first epoch.

        Raises :class:`DataError` for files that are missing or damaged, and for a split without a sample, and
        :class:`InputError` where the decoder is too short for what the encoder lacks.
        """
        needed = self._corruption.sizes(self._length)[1]
        if sequence_length < needed:
            raise InputError(
                f"train.sequence_length={sequence_length} is too short for the decoder: {needed} tokens are taken out",
                why=f"the encoder reads data.encoder_length={self._encoder_length} of {self._length} tokens",
                fix=f"set train.sequence_length to {needed} or more, or lower data.encoder_length",
            )
        sizes = self._encoder_length, sequence_length
        texts = [self._text(reader, split) for reader in self.readers]
        spans = Spans(texts, self._vocabulary, self._corruption, self._length, sizes, (seed, SPLITS.index(split)))
        self.check_filled(spans, split, "text", why=f"its documents have fewer than {LEAST} tokens")
        return spans

    def _text(self, reader: IndexedReader, split: Split) -> NDArray[Any]:
        """All tokens of the documents of ``split``, one after the other."""
        first, last = (reader.token_at(int(reader.documents[bound])) for bound in self.bounds(reader, split))
        return reader.tokens[first:last]


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin span-corruption of kind data."""
    return PluginInfo("data", "span-corruption", options=SpanOptions, check_config=check_split)


@hookimpl
def megatron_run_create_data(options: SpanOptions) -> DataSource:
    """Make the source. No file is read yet."""
    return SpanCorruption(options)
