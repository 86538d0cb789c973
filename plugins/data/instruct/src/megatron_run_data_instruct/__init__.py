"""data=instruct: conversations as JSON lines, through a chat template, packed; loss on responses only.

Reading order: ``conversations`` (lines), the engine's ``data.chat_template`` (texts and where their responses are),
here tokens and samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from megatron_run.contracts import DataSource, PluginInfo, Split
from megatron_run.contracts.data import Field as BatchField
from megatron_run.contracts.option_groups import OF_FILES
from megatron_run.errors import DataError
from megatron_run.errors.wording import plural
from megatron_run.hookspecs import hookimpl
from megatron_run_data_instruct.conversations import Line, conversation, lines_of
from megatron_run_engine.data import (
    AUTO,
    PACKED_FIELDS,
    PackedDocuments,
    Paths,
    Shares,
    SplitShares,
    TokenizedSource,
    best_fit,
    check_split,
    find_documents,
    one_a_row,
    require_within,
)
from megatron_run_engine.data.chat_template import NoConversation, Templates, template_source

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _moment(text: str | None) -> str | None:
    """``text``, if it is a date. Raises ValueError."""
    if text is not None:
        datetime.fromisoformat(text)
    return text


class InstructOptions(BaseModel):
    """The keys of section ``data`` when it uses instruct."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    paths: Annotated[Paths, OF_FILES] = Field(
        (), description="JSON lines of conversations: files, folders and patterns; needed"
    )
    tokenizer: Annotated[str, OF_FILES] = Field(
        "bytes", description="bytes, hf:ORG/NAME, or a file or folder: tokenizer.json, vocab.json, vocab.txt, .model"
    )
    template: Annotated[str, OF_FILES] = Field(
        AUTO, description="file of a Jinja chat template; auto: the tokenizer's, else lines of Role: text"
    )
    date: Annotated[str | None, AfterValidator(_moment)] = Field(
        None, description="what templates read as today, as 2026-11-30 or 2026-11-30T12:00; unset: the run's first day"
    )
    packing: Literal["documents", "none"] = Field(
        "documents", description="documents: conversations share rows unseen by each other; none: one a row, padded"
    )
    malformed: Literal["refuse", "skip"] = Field("refuse", description="a line that is no conversation")
    split: SplitShares = Field((90, 5, 5), description="shares of train, validation and test, in any unit")


@dataclass
class _Read:
    """The conversations of a split as tokens, ``counts`` true for those of responses; and what was left out."""

    tokens: list[NDArray[np.int64]] = field(default_factory=list)
    counts: list[NDArray[np.bool_]] = field(default_factory=list)
    malformed: int = 0


class Instruct(TokenizedSource):
    """Conversations from files. A split is read and tokenised when it is first opened, and then kept."""

    def __init__(self, options: InstructOptions) -> None:
        super().__init__(options.tokenizer)
        self._options, self._shares = options, Shares(*options.split)
        self._read: dict[Split, _Read] = {}
        self._summaries: dict[int, str] = {}

    @cached_property
    def _templates(self) -> Templates:
        options = self._options
        return Templates(options.template, self.tokenizer, options.tokenizer, options.date)

    @property
    def rows(self) -> int:
        """The ids without added tokens above all others."""
        return self.tokenizer.rows

    @property
    def fields(self) -> tuple[BatchField, ...]:
        """Positions and bounds of conversations too where they are packed."""
        return PACKED_FIELDS if self._options.packing == "documents" else super().fields

    def dataset(self, split: Split, sequence_length: int, seed: int) -> PackedDocuments:
        """Open ``split``. ``seed`` has no effect here: the sampler shuffles rows.

        Raises :class:`DataError` for a file that cannot be read, a malformed line unless they are skipped, and a split
        with a share of the data but no conversation.
        """
        if split not in self._read:
            self._read[split] = self._encoded(split)
        read = self._read[split]
        tokens = [each[: sequence_length + 1] for each in read.tokens]
        counts = [each[: sequence_length + 1] for each in read.counts]
        kept = [number for number, each in enumerate(counts) if each[1:].any()]
        sizes = [len(tokens[number]) for number in kept]
        dataset = PackedDocuments(
            np.concatenate([np.empty(0, np.int64), *(tokens[number] for number in kept)]),
            np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int64),
            sequence_length,
            padding=self.tokenizer.end_of_document,
            counts=np.concatenate([np.empty(0, np.bool_), *(counts[number] for number in kept)]),
            fit=best_fit if self._options.packing == "documents" else one_a_row,
        )
        if not len(dataset) and self._shares.share(split):
            raise self._empty(split, len(read.tokens))
        if split == "train":
            cut = sum(len(read.tokens[number]) > sequence_length + 1 for number in kept)
            most = max(map(len, read.tokens), default=1) - 1  # a row predicts every token but the first
            summary = _summary(
                dataset, cut, len(read.tokens) - len(kept), read.malformed, most if most > sequence_length else None
            )
            plain = "; without a chat template, turns are lines of Role: text" * self._templates.of(tools=False).plain
            lacking = "".join(f"; not learned, since responses lack it: {text!r}" for text in self._templates.unopened)
            self._summaries[sequence_length] = summary + plain + lacking
        return dataset

    def summary(self, sequence_length: int, seed: int) -> str:
        """How full the rows are, and how many conversations are cut short or left out."""
        if sequence_length not in self._summaries:
            self.dataset("train", sequence_length, seed)
        return self._summaries[sequence_length]

    def _encoded(self, split: Split) -> _Read:
        read = _Read()
        for line in lines_of(find_documents(self._options.paths)):
            if not self._shares.holds(line.content, split):
                continue
            try:
                tokens, counts = self._encode_line(line)
            except NoConversation as cause:
                if self._options.malformed == "refuse":
                    raise DataError(
                        f"{line} is no conversation to learn from",
                        why=str(cause),
                        origin="data.paths",
                        fix="correct the line, or set data.malformed=skip to leave such lines out",
                    ) from cause
                read.malformed += 1
                continue
            read.tokens.append(tokens)
            read.counts.append(counts)
        return read

    def _encode_line(self, line: Line) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The tokens of a conversation, and which of them are of responses. Raises :class:`NoConversation`."""
        messages, tools = conversation(line.content)
        template = self._templates.of(tools=tools is not None)
        text, spans = template.render(messages, tools)
        tokens, starts, stops = self.tokenizer.encode_places(text)
        require_within(tokens, self.vocab_size, line)
        counts = np.zeros(len(tokens), np.bool_)
        for start, stop in spans:
            counts |= (starts < stop) & (stops > start)
        if template.plain:  # it names no token that ends a text
            last = bool(spans) and spans[-1][1] == len(text)
            tokens, counts = np.append(tokens, self.tokenizer.end_of_document), np.append(counts, last)
        return tokens, counts

    def _empty(self, split: Split, read: int) -> DataError:
        if read:
            why = f"none of its {plural(read, 'conversation')} comes to a response within train.sequence_length tokens"
            return DataError(f"the {split} split is empty", why=why, fix="raise train.sequence_length")
        return DataError(
            f"the {split} split holds no conversation",
            why=f"its share is {self._shares.share(split):.0%}, and each line's own text says where it belongs",
            origin="data.paths and data.split",
            fix=f"name more conversations, or give {split} another share: data.split=100,0,0 trains on all of them",
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """The conversations."""
        return tuple(document.path for document in find_documents(self._options.paths))

    def chat_template(self, *, tools: bool = False) -> str:
        """Return the template that the model learns: ``data.template``, the tokenizer's, or lines of Role: text."""
        return template_source(self._options.template, self.tokenizer, tools=tools)

    @property
    def end_of_text(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.end_of_document


def _summary(dataset: PackedDocuments, cut: int, silent: int, malformed: int, longest: int | None) -> str:
    summary = str(dataset).replace("document", "conversation", 1)
    if cut:
        summary += f"; {cut} longer than a row lost their end"
    if silent:
        summary += f"; {silent} whose response begins beyond a row left out"
    if longest is not None:
        summary += f"; train.sequence_length={longest} holds the longest whole"
    return summary + (f"; {plural(malformed, 'malformed line')} left out" if malformed else "")


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin instruct of kind data.

    Responses are of unequal length: a mean of microbatch means would weigh a token by its microbatch's other ones, and
    so make the update a matter of ``train.micro_batch_size``.
    """
    suggests, decides = {"train.loss_mean": "token"}, {"date": lambda: date.today().isoformat()}
    return PluginInfo(
        "data", "instruct", options=InstructOptions, suggests=suggests, decides=decides, check_config=check_split
    )


@hookimpl
def megatron_run_create_data(options: InstructOptions) -> DataSource:
    """Make the source. No file is read yet."""
    if not options.paths:
        raise DataError(
            "data=instruct has no conversations of its own", origin="data.paths", fix="add --set data.paths=chats.jsonl"
        )
    return Instruct(options)
