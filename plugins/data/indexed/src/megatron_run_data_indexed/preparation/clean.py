"""From texts to the texts that are worth training on, as JSON lines, and why the others are not among them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from megatron_run.errors import DataError, InputError, refuse_taken
from megatron_run.files.publishing import half_named, publishing
from megatron_run_data_indexed.preparation.document_rules import Examiner, Rules, judge, ngrams_of
from megatron_run_data_indexed.preparation.inputs import ENDINGS, Input, blocks
from megatron_run_data_indexed.preparation.records import Reading, read_records, texts
from megatron_run_engine.data import files_of_tokenizer, open_tokenizer
from megatron_run_engine.data.user_files import packing

#: Bytes read at once.
_BLOCK = 2**22


@dataclass
class Tally:
    """Documents and their tokens."""

    documents: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        """Count a document."""
        self.documents += 1
        self.tokens += tokens


@dataclass
class Report:
    """Documents that stayed and that went by each rule; malformed and empty records. ``size``: bytes read."""

    kept: Tally = field(default_factory=Tally)
    removed: dict[str, Tally] = field(default_factory=dict)
    malformed: int = 0
    empty: int = 0
    size: int = 0


@dataclass(frozen=True)
class Cleaning:
    """A cleaning of ``inputs`` into ``out`` by ``rules``; ``tests`` are what no document may hold parts of."""

    inputs: tuple[Input, ...]
    out: Path
    tokenizer: str
    rules: Rules = field(default_factory=Rules)
    reading: Reading = field(default_factory=Reading)
    tests: tuple[Input, ...] = ()
    workers: int = 1

    @property
    def size(self) -> int:
        """Bytes of all inputs."""
        return sum(source.size for source in self.inputs)

    @property
    def removed(self) -> Path:
        """Where a line for each document that went tells its name, the rule, why, and its tokens."""
        return self.out.with_name(f"{self.out.name.partition('.')[0]}.removed.jsonl")


class _Document(NamedTuple):
    name: str
    text: str
    line: bytes


def clean(job: Cleaning, *, overwrite: bool = False, progress: Callable[[Report], None]) -> Report:
    """Write the documents of ``job`` that stay, each as the JSON object that it was, or as one with the key ``text``.

    Both files appear when they are whole. Raises :class:`DataError` for what cannot be read or written, and for the
    first malformed record if these are refused; :class:`InputError` for a file that exists, a name of another format,
    and a missing library.
    """
    plain = Path(job.out.name.removesuffix(".gz").removesuffix(".zst"))
    if ENDINGS.get(plain.suffix) != "jsonl":  # the other commands would not read it
        why = "JSON lines are written, also .gz or .zst"
        raise InputError(f"{job.out} does not say its format", why=why, fix=f"name it {plain}.jsonl")
    unfinished = half_named(job.removed, job.out)
    for path in (job.out, job.removed):
        inputs = (*(source.path for source in (*job.inputs, *job.tests)), *files_of_tokenizer(job.tokenizer))
        refuse_taken(path, "--out", overwrite=overwrite or path in unfinished, inputs=inputs)
    report = Report()
    tests = ngrams_of(texts(job.tests, Reading(job.reading.key, job.reading.separator, "skip")), job.rules.ngram)
    examiner = partial(_examiner, job.rules, job.tokenizer, tests)
    with _written(job.removed, job.out) as (removed, out):
        for document, verdict in judge(_documents(job, report, progress), job.rules, examiner, job.workers):
            if verdict.rule:
                report.removed.setdefault(verdict.rule, Tally()).add(verdict.tokens)
                removed.write(_json({"name": document.name, **verdict._asdict()}))
            else:
                report.kept.add(verdict.tokens)
                out.write(document.line + b"\n" if document.line else _json({"text": document.text}))
    return report


def _examiner(rules: Rules, tokenizer: str, tests: frozenset[str]) -> Examiner:
    opened = open_tokenizer(tokenizer)

    def count(documents: Sequence[str]) -> Sequence[int]:
        return [len(tokens) for tokens in opened.encode_batch([("", text.encode()) for text in documents])]

    return Examiner(rules, count, tests)


def _documents(job: Cleaning, report: Report, progress: Callable[[Report], None]) -> Iterator[_Document]:
    """Every document of the inputs, with the number of its record in its file, from 1 on."""
    source, number = None, 0
    for block in blocks(job.inputs, job.reading.separator, _BLOCK):
        if block.source is not source:
            source, number = block.source, 0
        for record in read_records(block, job.reading):
            number += 1
            name = f"{block.source.path}:{number}"
            if record.fault:
                report.malformed += 1
                if job.reading.malformed == "refuse":
                    raise DataError(f"{name} is malformed", why=record.fault, fix="mend it, or add --malformed skip")
            if record.text and (not record.fault or job.reading.malformed == "keep"):
                yield _Document(name, record.text.decode("utf-8"), record.line)
            elif not record.fault:
                report.empty += 1
        report.size += block.consumed
        progress(report)


def _json(record: Mapping[str, object]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


@contextmanager
def _written(*paths: Path) -> Iterator[list[IO[bytes]]]:
    """Files that get their names when all are whole, each compressed as its name says. Raises :class:`DataError`."""
    try:
        with publishing(*paths) as files, ExitStack() as stack:
            yield [stack.enter_context(packing(path, file)) for path, file in zip(paths, files, strict=True)]
    except OSError as cause:
        where = cause.filename or " and ".join(map(str, paths))
        raise DataError(f"{where} cannot be written", why=cause.strerror or str(cause)) from cause
