"""data=sentence-pairs: what BERT learns from, out of Megatron's indexed datasets.

Reading order: here the source, ``pairs`` (samples), ``masking`` (hidden words, and the random numbers of a sample),
``vocabulary`` (what a tokenizer must tell).
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from pydantic import Field

from megatron_run.contracts import DataSource, PluginInfo, Split
from megatron_run.contracts.data import LABELS, LOSS_MASK, TOKENS
from megatron_run.contracts.data import Field as BatchField
from megatron_run.contracts.option_groups import OF_FILES
from megatron_run.errors import InputError
from megatron_run.errors.wording import plural
from megatron_run.hookspecs import hookimpl
from megatron_run_data_sentence_pairs.masking import Masking
from megatron_run_data_sentence_pairs.pairs import LEAST, SPECIALS, Documents, Pairs
from megatron_run_data_sentence_pairs.vocabulary import PairVocabulary, pair_vocabulary
from megatron_run_engine.data import SPLITS, PreparedTextOptions, PreparedTexts, check_split

#: A sample ends with padding, which is a document of its own: no token sees another's.
_BOUNDS = BatchField("documents", shape=(None,))


class PairOptions(PreparedTextOptions):
    """The keys of section ``data`` when it uses sentence-pairs."""

    tokenizer: Annotated[str, OF_FILES] = Field(
        "bytes", description="what made the tokens: bytes, or a file or folder, as of data prepare; vocab.txt is BERT's"
    )
    masked: float = Field(0.15, gt=0, lt=1, description="share of the tokens that are guessed")
    longest_run: int = Field(3, ge=1, description="words that are hidden together, at most")


class SentencePairs(PreparedTexts):
    """Pairs of neighbouring texts."""

    def __init__(self, options: PairOptions) -> None:
        super().__init__(options, "sentence-pairs")
        self._options = options

    @cached_property
    def _vocabulary(self) -> PairVocabulary:
        return pair_vocabulary(self.tokenizer)

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
        vocabulary, options = self._vocabulary, self._options
        masking = Masking(vocabulary.begins, vocabulary.mask, vocabulary.plain, options.masked, options.longest_run)
        parts = [Documents(reader, *self.bounds(reader, split), room) for reader in self.readers]
        pairs = Pairs(parts, vocabulary, masking, sequence_length, (seed, SPLITS.index(split)))
        share = options.split[SPLITS.index(split)] / sum(options.split)
        documents = sum(len(reader.documents) - 1 for reader in self.readers)
        why = (
            f"{share:.1%} of {plural(documents, 'document')} are for it, and a pair needs a document of {LEAST} tokens"
        )
        self.check_filled(pairs, split, "pair of texts", why)
        return pairs


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin sentence-pairs of kind data."""
    return PluginInfo("data", "sentence-pairs", options=PairOptions, check_config=check_split)


@hookimpl
def megatron_run_create_data(options: PairOptions) -> DataSource:
    """Make the source. No file is read yet."""
    return SentencePairs(options)
