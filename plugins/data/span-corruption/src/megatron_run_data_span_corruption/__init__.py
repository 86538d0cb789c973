"""data=span-corruption: what T5 learns from, out of Megatron's indexed datasets. ``spans`` makes the samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import Dataset, DataSource, PluginInfo, Split
from megatron_run.contracts.data import LABELS, LOSS_MASK, TOKENS
from megatron_run.contracts.data import Field as BatchField
from megatron_run.errors import DataError, InputError
from megatron_run.hookspecs import hookimpl
from megatron_run_data_span_corruption.spans import LEAST, Corruption, Epochs, Spans, SpanVocabulary, span_vocabulary
from megatron_run_engine.data.indexed_files import Reader, open_tokens
from megatron_run_engine.data.option_types import AT_COMMAS, SplitShares
from megatron_run_engine.data.tokenizer import Tokenizer, json_file, open_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run.contracts.schema import Config

_PLACE: Mapping[Split, int] = MappingProxyType({"train": 0, "validation": 1, "test": 2})


class SpanOptions(BaseModel):
    """The keys of section ``data`` when it uses span-corruption."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    paths: Annotated[tuple[str, ...], AT_COMMAS] = Field(
        (), description="datasets, each the prefix of a .bin and .idx pair; needed"
    )
    tokenizer: str = Field("bytes", description="what made the tokens: bytes, or a file or folder, as of data prepare")
    split: SplitShares = Field(
        (969, 30, 1), description="shares of train, validation and test, in any unit, by document"
    )
    encoder_length: int = Field(512, ge=LEAST + 2, description="tokens that the encoder reads, as the model's")
    corrupted: float = Field(0.15, gt=0, lt=1, description="share of the tokens that are taken out")
    span: float = Field(3.0, ge=1, description="tokens that are taken out together, in the mean")


class SpanCorruption(DataSource):
    """Texts without some runs, and the runs. Datasets are opened, and checked, when a split is first opened."""

    def __init__(self, options: SpanOptions) -> None:
        self._options = options
        self._corruption = Corruption(options.corrupted, options.span)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return open_tokenizer(self._options.tokenizer)

    @cached_property
    def _length(self) -> int:
        """The tokens of a text."""
        return self._corruption.longest(self._options.encoder_length)

    @cached_property
    def _vocabulary(self) -> SpanVocabulary:
        return span_vocabulary(self._tokenizer, self._corruption.counts(self._length)[1])

    @cached_property
    def _readers(self) -> tuple[Reader, ...]:
        return tuple(open_tokens(path) for path in self._options.paths)

    @property
    def vocab_size(self) -> int:
        """The ids of the tokenizer, and of the special tokens that it lacks."""
        return self._vocabulary.size

    @property
    def fields(self) -> tuple[BatchField, ...]:
        """The decoder's tokens as those of every sample, and the encoder's, with 0 in a mask at its padding."""
        shape = (self._options.encoder_length,)
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
                why=f"the encoder reads data.encoder_length={self._options.encoder_length} of {self._length} tokens",
                fix=f"set train.sequence_length to {needed} or more, or lower data.encoder_length",
            )
        sizes = self._options.encoder_length, sequence_length
        texts = [self._text(reader, split) for reader in self._readers]
        spans = Spans(texts, self._vocabulary, self._corruption, self._length, sizes, (seed, _PLACE[split]))
        if self._options.split[_PLACE[split]] and not len(spans):
            raise DataError(
                f"the {split} split holds no text",
                why=f"its documents have fewer than {LEAST} tokens",
                origin="data.paths and data.split",
                fix=f"give {split} a larger share with data.split, or name more datasets",
            )
        return spans

    def stream(self, split: Split, sequence_length: int, seed: int, samples: int) -> Dataset:
        """Open ``split`` shuffled; each epoch takes out other runs. Raises as :meth:`dataset`."""
        spans = self.dataset(split, sequence_length, seed)
        return Epochs(spans, seed) if len(spans) else spans

    def _text(self, reader: Reader, split: Split) -> NDArray[Any]:
        """All tokens of the documents of ``split``, one after the other."""
        shares = self._options.split
        ends = np.cumsum((0, *shares)) / sum(shares) * (len(reader.documents) - 1)
        bounds = np.round(ends[_PLACE[split] : _PLACE[split] + 2]).astype(int)
        first, last = (reader.token_at(int(reader.documents[bound])) for bound in bounds)
        return reader.tokens[first:last]

    @property
    def tokenizer_file(self) -> Path | None:
        """The JSON file of ``data.tokenizer``, None for bytes and SentencePiece."""
        return json_file(self._options.tokenizer)

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of ``text``, without special tokens."""
        tokens: list[int] = self._tokenizer.encode(text.encode(), "the text").tolist()
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``; special tokens that were added have none."""
        return self._tokenizer.decode([token for token in tokens if token < self._tokenizer.vocab_size])


def check_config(config: Config, options: SpanOptions) -> Iterator[str]:  # noqa: ARG001  # the contract's
    """A notice where nothing is kept for validation."""
    if not options.split[1]:
        yield "data.split gives validation nothing: nothing is evaluated"


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin span-corruption of kind data."""
    return PluginInfo("data", "span-corruption", options=SpanOptions, check_config=check_config)


@hookimpl
def megatron_run_create_data(options: SpanOptions) -> DataSource:
    """Make the source. No file is read yet."""
    if not options.paths:
        raise DataError(
            "data=span-corruption has no texts of its own",
            origin="data.paths",
            fix="make a dataset with megatron-run data prepare, and add --set data.paths=PREFIX",
        )
    return SpanCorruption(options)
