"""data=text: text files as bytes or through a tokenizer, split by document and packed into samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from math import ceil
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import DataSource, PluginInfo, Split
from megatron_run.contracts.data import Field as BatchField
from megatron_run.contracts.option_groups import OF_FILES
from megatron_run.errors import DataError
from megatron_run.errors.wording import plural
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.data.documents import (
    CUT_FROM,
    Bigram,
    Document,
    PackedDataset,
    Shares,
    find_documents,
    standard_library,
)
from megatron_run_engine.data.option_types import Paths, SplitShares, check_split
from megatron_run_engine.data.packing import PACKED_FIELDS, PackedDocuments, bounds_of
from megatron_run_engine.data.token_cache import open_streams
from megatron_run_engine.data.tokenized_source import TokenizedSource

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray


#: The most tokens on which the bigram baseline is fitted: two seconds and half a gigabyte.
BIGRAM_TOKENS = 2**24


#: Of so many documents some go to each split, by the common shares.
FEW = 100


class TextOptions(BaseModel):
    """The keys of section ``data`` when it uses text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    paths: Annotated[Paths, OF_FILES] = Field(
        (), description="files, folders and patterns; empty: the sources of Python's standard library"
    )
    tokenizer: Annotated[str, OF_FILES] = Field(
        "bytes", description="bytes, hf:ORG/NAME, or a file or folder: tokenizer.json, vocab.json, vocab.txt, .model"
    )
    packing: Literal["stream", "documents"] = Field(
        "stream", description="stream: documents run into each other; documents: attention stays within each"
    )
    split: SplitShares = Field((90, 5, 5), description="shares of train, validation and test, in any unit")


class Text(TokenizedSource):
    """Documents from files. All splits are tokenised, or found in the cache, when one is first opened."""

    def __init__(self, options: TextOptions) -> None:
        super().__init__(options.tokenizer)
        self._options, self._shares = options, Shares(*options.split)

    @cached_property
    def _streams(self) -> Mapping[Split, NDArray[Any]]:
        return open_streams(self._texts, self.tokenizer, self._shares, cut=self._cuts_all)

    @property
    def rows(self) -> int:
        """The ids without added tokens above all others."""
        return self.tokenizer.rows

    @property
    def fields(self) -> tuple[BatchField, ...]:
        """Positions and bounds of documents too where they are packed."""
        return PACKED_FIELDS if self._options.packing == "documents" else super().fields

    def dataset(self, split: Split, sequence_length: int, seed: int) -> PackedDataset | PackedDocuments:
        """Open ``split``. ``seed`` has no effect here: the sampler shuffles.

        A validation or test split to which the shares give nothing is empty. Raises :class:`DataError` for a file that
        is missing, empty, unreadable or no text for the tokenizer, and for a split that is too short for one sample.
        """
        dataset = self._cut(self._streams[split], sequence_length)
        if not len(dataset) and self._shares.share(split):
            raise self._too_short(split, sequence_length)
        return dataset

    def _cut(self, stream: NDArray[Any], length: int) -> PackedDataset | PackedDocuments:
        if self._options.packing == "stream":
            return PackedDataset(stream, length)
        end = self.tokenizer.end_of_document
        return PackedDocuments(stream, bounds_of(stream, end), length, padding=end)

    def summary(self, sequence_length: int, seed: int) -> str:
        """How full the rows of packed documents are."""
        train = self.dataset("train", sequence_length, seed)
        return str(train) if isinstance(train, PackedDocuments) else ""

    @cached_property
    def _texts(self) -> tuple[Document, ...]:
        return find_documents(self._options.paths) if self._options.paths else standard_library()

    @cached_property
    def _cuts_all(self) -> bool:
        """Whether documents are cut whatever their size: one, or so few that training or validation gets none."""
        documents = self._texts
        if any(each.path.stat().st_size >= CUT_FROM for each in documents if not each.has_records):
            return len(documents) == 1
        contents = [content for _, content in islice(chain.from_iterable(each.contents() for each in documents), FEW)]
        if len(contents) in (1, FEW):
            return len(contents) == 1
        wanted: tuple[Split, ...] = ("train", "validation")
        return any(
            self._shares.share(split) and not any(self._shares.holds(content, split) for content in contents)
            for split in wanted
        )

    def _too_short(self, split: Split, sequence_length: int) -> DataError:
        """The error of a ``split`` without a sample, with every way out that leads to one."""
        share, documents, tokens = self._shares.share(split), len(self._texts), len(self._streams[split])
        ways = ["name more text"]
        records = any(each.has_records for each in self._texts)
        if not self._cuts_all and not records:
            ways.append("join it into one file, which is cut")
        needed = (sequence_length + 2) * share / max(tokens, 1)  # of the text, where it is cut by shares
        if self._cuts_all and needed < 0.95:
            ways.append(f"give {split} {ceil(100 * needed)}% of it with data.split")
        elif not self._cuts_all and share < 0.5:
            ways.append(f"give {split} a larger share with data.split")
        if tokens > 1:
            ways.append(f"lower train.sequence_length to {tokens - 1}")
        return DataError(
            f"the {split} split is too short for one sample",
            why=f"{share:.0%} of {plural(documents, 'file')} came to {tokens} tokens, and a sample needs "
            f"{sequence_length + 1}"
            + ("" if self._cuts_all else f"; texts below {CUT_FROM // 1024} KiB go to one split whole"),
            origin="data.paths and data.split",
            fix=", or ".join(ways),
        )

    def baselines(self, sequence_length: int, seed: int, samples: Sequence[int]) -> Mapping[str, float]:
        """Return the loss of a bigram model, fitted on the training split, on ``samples`` of the validation split.

        It is scored on the same tokens and labels as the trained model. If the training split is longer than
        ``BIGRAM_TOKENS``, the bigram is fitted on every n-th sample.
        """
        if not samples:
            return {}
        train, validation = (self.dataset(split, sequence_length, seed) for split in ("train", "validation"))
        every = 1 + len(train) * sequence_length // BIGRAM_TOKENS
        model = Bigram(*train.pairs(range(0, len(train), every)), self.vocab_size)
        return {f"{self.tokenizer.unit} bigram": model.loss(*validation.pairs(samples))}

    @property
    def files(self) -> tuple[Path, ...]:
        """The texts."""
        return tuple(document.path for document in self._texts)

    def chat_template(self, *, tools: bool = False) -> str | None:
        """As the tokenizer's folder says."""
        return self.tokenizer.template(tools=tools)

    @property
    def end_of_text(self) -> int:
        """The token between documents."""
        return self.tokenizer.end_of_document


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin text of kind data."""
    return PluginInfo("data", "text", options=TextOptions, check_config=check_split)


@hookimpl
def megatron_run_create_data(options: TextOptions) -> DataSource:
    """Make the source. No file is read yet."""
    return Text(options)
