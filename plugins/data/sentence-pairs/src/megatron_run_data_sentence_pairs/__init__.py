"""data=sentence-pairs: what BERT learns from, out of Megatron's indexed datasets.

Reading order: here the source, ``pairs`` (samples), ``masking`` (hidden words), ``vocabulary`` (what a tokenizer must
tell), ``draws`` (random numbers of a sample).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import Dataset, DataSource, PluginInfo, Split
from megatron_run.contracts.data import LABELS, LOSS_MASK, TOKENS
from megatron_run.contracts.data import Field as BatchField
from megatron_run.errors import DataError, InputError, plural
from megatron_run.hookspecs import hookimpl
from megatron_run_data_sentence_pairs.masking import Masking
from megatron_run_data_sentence_pairs.pairs import LEAST, SPECIALS, Documents, Epochs, Pairs
from megatron_run_data_sentence_pairs.vocabulary import PairVocabulary, pair_vocabulary
from megatron_run_engine.data.indexed_files import Reader, open_tokens
from megatron_run_engine.data.option_types import AT_COMMAS, SplitShares
from megatron_run_engine.data.tokenizer import Tokenizer, json_file, open_tokenizer

if TYPE_CHECKING:
    from megatron_run.contracts.schema import Config

_PLACE: Mapping[Split, int] = MappingProxyType({"train": 0, "validation": 1, "test": 2})
#: A sample ends with padding, which is a document of its own: no token sees another's.
_BOUNDS = BatchField("documents", shape=(None,))


class PairOptions(BaseModel):
    """The keys of section ``data`` when it uses sentence-pairs."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    paths: Annotated[tuple[str, ...], AT_COMMAS] = Field(
        (), description="datasets, each the prefix of a .bin and .idx pair; needed"
    )
    tokenizer: str = Field(
        "bytes", description="what made the tokens: bytes, or a file or folder, as of data prepare; vocab.txt is BERT's"
    )
    split: SplitShares = Field(
        (969, 30, 1), description="shares of train, validation and test, in any unit, by document"
    )
    masked: float = Field(0.15, gt=0, lt=1, description="share of the tokens that are guessed")
    longest_run: int = Field(3, ge=1, description="words that are hidden together, at most")


class SentencePairs(DataSource):
    """Pairs of neighbouring texts. Datasets are opened, and checked, when a split is first opened."""

    def __init__(self, options: PairOptions) -> None:
        self._options = options

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return open_tokenizer(self._options.tokenizer)

    @cached_property
    def _vocabulary(self) -> PairVocabulary:
        return pair_vocabulary(self._tokenizer)

    @cached_property
    def _readers(self) -> tuple[Reader, ...]:
        return tuple(open_tokens(path) for path in self._options.paths)

    @property
    def vocab_size(self) -> int:
        """The ids of the tokenizer, and of the special tokens that it lacks."""
        return self._vocabulary.size

    @property
    def fields(self) -> tuple[BatchField, ...]:
        """Which text a token is of, where padding begins, and whether the texts are swapped."""
        return (TOKENS, LABELS, LOSS_MASK, BatchField("token_types"), _BOUNDS, BatchField("swapped", shape=()))

    def dataset(self, split: Split, sequence_length: int, seed: int) -> Pairs:
        """Open ``split`` in the order of the files, as it is in the first epoch.

        Raises :class:`DataError` for files that are missing or damaged, and for a split without a sample.
        """
        room = sequence_length - SPECIALS
        if room < LEAST:
            raise InputError(
                f"train.sequence_length={sequence_length} leaves {room} tokens for two texts",
                fix=f"set it to {LEAST + SPECIALS} or more",
            )
        parts = [Documents(reader, *self._bounds(reader, split), room) for reader in self._readers]
        place, shares = _PLACE[split], self._options.split
        if shares[place] and not any(len(part) for part in parts):
            raise DataError(
                f"the {split} split holds no pair of texts",
                why=f"{shares[place] / sum(shares):.1%} of {plural(self._documents, 'document')} are for it, and a "
                f"pair needs a document of {LEAST} tokens",
                origin="data.paths and data.split",
                fix=f"give {split} a larger share with data.split, or name more datasets",
            )
        vocabulary = self._vocabulary
        masking = Masking(
            vocabulary.begins, vocabulary.mask, vocabulary.plain, self._options.masked, self._options.longest_run
        )
        return Pairs(parts, vocabulary, masking, sequence_length, (seed, place))

    def stream(self, split: Split, sequence_length: int, seed: int, samples: int) -> Dataset:
        """Open ``split`` shuffled; each epoch hides other words. Raises as :meth:`dataset`."""
        pairs = self.dataset(split, sequence_length, seed)
        return Epochs(pairs, seed) if len(pairs) else pairs

    @property
    def _documents(self) -> int:
        return sum(len(reader.documents) - 1 for reader in self._readers)

    def _bounds(self, reader: Reader, split: Split) -> tuple[int, int]:
        """The first document of ``split``, and the one after its last."""
        ends = np.cumsum((0, *self._options.split)) / sum(self._options.split) * (len(reader.documents) - 1)
        first, last = np.round(ends[_PLACE[split] : _PLACE[split] + 2]).astype(int).tolist()
        return first, last

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
        return self._tokenizer.decode([token for token in tokens if token < self._vocabulary.plain])


def check_config(config: Config, options: PairOptions) -> Iterator[str]:  # noqa: ARG001  # the contract's
    """A notice where nothing is kept for validation."""
    if not options.split[1]:
        yield "data.split gives validation nothing: nothing is evaluated"


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin sentence-pairs of kind data."""
    return PluginInfo("data", "sentence-pairs", options=PairOptions, check_config=check_config)


@hookimpl
def megatron_run_create_data(options: PairOptions) -> DataSource:
    """Make the source. No file is read yet."""
    if not options.paths:
        raise DataError(
            "data=sentence-pairs has no texts of its own",
            origin="data.paths",
            fix="make a dataset with megatron-run data prepare, and add --set data.paths=PREFIX",
        )
    return SentencePairs(options)
