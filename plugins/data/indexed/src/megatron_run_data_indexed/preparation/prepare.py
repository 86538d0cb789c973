"""From inputs to an indexed dataset, by all cores; the bytes depend on inputs and tokenizer alone.

Beside the dataset lies the folder ``PREFIX.preparing`` until it is whole: ``plan.json`` says of what it is made, and
every block has a part. Killed at any moment, the same command makes the parts that are missing, and joins them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_run.errors import DataError, InputError, ToldToEnd
from megatron_run.files.publishing import publishing
from megatron_run_data_indexed.preparation.about import about_path, read_json, refuse_dataset, writing
from megatron_run_data_indexed.preparation.inputs import Block, Input, blocks
from megatron_run_data_indexed.preparation.parts import Account, read_part, write_part
from megatron_run_data_indexed.preparation.records import Reading, Record, read_records
from megatron_run_data_indexed.preparation.workers import Workers
from megatron_run_engine.data import Tokenizer, files_of_tokenizer, open_tokenizer
from megatron_run_engine.data.indexed_files import dtype_for

#: Bytes of a block: small enough to keep all processes busy, large enough for few parts.
SMALLEST, LARGEST, PARTS = 2**20, 2**26, 4096
#: Bytes of text that a process tokenises at once.
_BATCH = 2**18
#: Blocks that a dry run tokenises.
_SAMPLED = 8
_PLAN = "plan.json"
#: How inputs are cut into blocks and read. Parts that were made otherwise are not joined with those of today.
_READS = 3
_UNITS = {"jsonl": "line", "text": "document", "parquet": "row"}


@dataclass(frozen=True)
class Preparation:
    """A preparation of ``inputs`` into the dataset ``prefix``, with the ``tokenizer`` that ``open_tokenizer`` opens.

    ``end`` names the token after each document: None for the tokenizer's own, ``none`` for no such token.
    """

    inputs: tuple[Input, ...]
    prefix: Path
    tokenizer: str
    reading: Reading = field(default_factory=Reading)
    end: str | None = None
    workers: int = 1

    @property
    def size(self) -> int:
        """Bytes of all inputs."""
        return sum(source.size for source in self.inputs)

    @property
    def folder(self) -> Path:
        """Where parts lie until the dataset is whole."""
        return self.prefix.with_name(f"{self.prefix.name}.preparing")

    def blocks(self) -> Iterator[Block]:
        """All blocks, in order."""
        size = max(SMALLEST, min(LARGEST, self.size // PARTS))
        return blocks(self.inputs, self.reading.separator, size)


@dataclass
class Totals:
    """The sum over blocks. ``size`` counts bytes of inputs, ``seconds`` of work those that one process took.

    ``lost`` counts characters of documents, white space aside, for which the tokenizer has no token.
    """

    size: int = 0
    documents: int = 0
    empty: int = 0
    malformed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    lost: int = 0

    def add(self, block: Block, account: Account) -> None:
        """Count a block."""
        self.size += block.consumed
        self.documents += account.documents
        self.empty += account.empty
        self.malformed += len(account.faults)
        self.tokens += account.tokens
        self.lost += account.lost


def prepare(
    job: Preparation, *, overwrite: bool = False, tell: Callable[[str], None], progress: Callable[[Totals], None]
) -> Totals:
    """Write the dataset of ``job``, or go on with it; return what it holds.

    ``tell`` gets a line for every malformed record, ``progress`` the totals after each block. Raises
    :class:`DataError` for inputs that cannot be read, a malformed record that is refused, and a disk without space;
    :class:`InputError` for a dataset that exists, and for another preparation of the same name.
    """
    tokenizer = open_tokenizer(job.tokenizer)
    end = end_token(tokenizer, job.end)
    dtype = dtype_for(tokenizer.vocab_size)
    with _disk(job), _held(job, tokenizer, end, overwrite=overwrite) as mark:
        plan = int(mark, 16)

        def work(block: Block) -> None:
            with _disk(job):
                path = _part(job, block.number)
                found = read_part(path, plan, dtype)
                if found is None or not _as_asked(found[2], job.reading):
                    write_part(path, plan, *tokenised(block, job.reading, tokenizer, end, dtype))

        totals = Totals()
        count = 0
        with Workers(job.workers, work) as workers:
            lines = _Lines(job.reading, tell)
            for block in workers.map(job.blocks()):
                account = _read(job, block.number, plan, dtype)[2]
                lines.count(block, account)
                totals.add(block, account)
                progress(totals)
                count += 1
        if not totals.documents:
            raise DataError("there is no document", why=f"{totals.empty} were empty, {totals.malformed} malformed")
        with writing(job.prefix, dtype, lambda: {**_about(job, tokenizer, end, totals), "plan": mark}) as writer:
            for number in range(count):
                tokens, lengths, _ = _read(job, number, plan, dtype)
                writer.add_documents(tokens, lengths)
        (job.folder / _PLAN).unlink()  # from here on the folder is a leftover
    return totals


def estimate(job: Preparation) -> Totals:
    """Tokenise some blocks, and return what all of them would come to; ``seconds`` are those of one process."""
    tokenizer = open_tokenizer(job.tokenizer)
    end, dtype = end_token(tokenizer, job.end), dtype_for(tokenizer.vocab_size)
    whole: list[Block] = []
    size = max(SMALLEST, min(LARGEST, job.size // PARTS))
    for source in job.inputs:
        first = 1 if source.compression else None  # to find the others, all of it would have to be unpacked
        whole += islice(blocks([source], job.reading.separator, size), first)
    places = sorted({round(place) for place in np.linspace(0, len(whole) - 1, min(_SAMPLED, len(whole)))})
    totals, begun = Totals(), time.perf_counter()
    for place in places:
        totals.add(whole[place], tokenised(whole[place], job.reading, tokenizer, end, dtype)[2])
    scale = job.size / max(totals.size, 1)
    counts = (totals.documents, totals.empty, totals.malformed, totals.tokens, totals.lost)
    documents, empty, malformed, tokens, lost = (round(count * scale) for count in counts)
    return Totals(job.size, documents, empty, malformed, tokens, (time.perf_counter() - begun) * scale, lost)


def bytes_needed(job: Preparation, totals: Totals) -> int:
    """Return the bytes of the dataset that ``totals`` describe, and of the parts, which exist beside it for a while."""
    width = dtype_for(open_tokenizer(job.tokenizer).vocab_size).itemsize
    return 2 * width * totals.tokens + 24 * totals.documents


def end_token(tokenizer: Tokenizer, name: str | None) -> int | None:
    """Return the id of the token ``name``, by default the tokenizer's end of a document; None for ``none``.

    Raises :class:`InputError` for text that is not one token.
    """
    if name is None:
        return tokenizer.end_of_document
    if name == "none":
        return None
    tokens = tokenizer.encode(name.encode(), "--end-of-document")
    if len(tokens) != 1:
        raise InputError(
            f"{name!r} is {len(tokens)} tokens", why="a document ends with one", origin="--end-of-document"
        )
    return int(tokens[0])


def tokenised(
    block: Block, reading: Reading, tokenizer: Tokenizer, end: int | None, dtype: np.dtype[Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], Account]:
    """Return the tokens of a block in a row, the length of each document, and the account of its records."""
    documents: list[tuple[object, bytes]] = []
    pieces: list[np.ndarray[Any, Any]] = []
    lengths: list[int] = []
    faults: list[tuple[int, str]] = []
    records = empty = waiting = 0
    last, lost_before = np.array([] if end is None else [end], dtype), tokenizer.lost

    def flush() -> None:
        nonlocal empty
        for tokens in tokenizer.encode_batch(documents):
            if not len(tokens):  # the tokenizer has none for any of its characters
                empty += 1
                continue
            pieces.extend((tokens.astype(dtype), last))
            lengths.append(len(tokens) + len(last))
        documents.clear()

    for record in read_records(block, reading):
        records += 1
        if record.fault:
            faults.append((records, record.fault))
        if _dropped(record, reading):
            empty += not record.fault
            continue
        documents.append((block.source.path, record.text))
        waiting += len(record.text)
        if waiting >= _BATCH:
            flush()
            waiting = 0
    flush()
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype)
    lost, kept = tokenizer.lost - lost_before, reading.malformed == "keep"
    account = Account(records, len(lengths), empty, len(tokens), tuple(faults), kept, lost)
    return tokens, np.array(lengths, np.int32), account


def _dropped(record: Record, reading: Reading) -> bool:
    return not record.text.strip() or (bool(record.fault) and reading.malformed != "keep")


def _as_asked(account: Account, reading: Reading) -> bool:
    """Whether a part was made with what is asked for malformed records, where it has any."""
    return not account.faults or account.kept == (reading.malformed == "keep")


class _Lines:
    """Numbers the records of each file over its blocks, and tells the malformed ones or refuses the first."""

    def __init__(self, reading: Reading, tell: Callable[[str], None]) -> None:
        self._reading, self._tell = reading, tell
        self._source: Input | None = None
        self._before = 0

    def count(self, block: Block, account: Account) -> None:
        """Take the next block."""
        if block.source != self._source:
            self._source, self._before = block.source, 0
        for number, why in account.faults:
            place = f"{block.source.path}, {_UNITS[block.source.format]} {self._before + number}"
            if self._reading.malformed == "refuse":
                raise DataError(
                    f"{place} is malformed",
                    why=why,
                    fix="with --malformed skip or keep the same command goes on from here",
                )
            self._tell(f"{place} is {'kept as text' if account.kept else 'left out'}: {why}")
        self._before += account.records


def _part(job: Preparation, number: int) -> Path:
    return job.folder / f"{number:08}.part"


def _read(job: Preparation, number: int, plan: int, dtype: np.dtype[Any]) -> tuple[Any, Any, Account]:
    found = read_part(_part(job, number), plan, dtype)
    if found is None:
        raise DataError(f"{_part(job, number)} was damaged meanwhile", fix="run the same command again")
    return found


@contextmanager
def _disk(job: Preparation) -> Iterator[None]:
    """Name the folder for an error of the disk."""
    try:
        yield
    except OSError as cause:
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            f"{job.prefix} cannot be written",
            why=cause.strerror or str(cause),
            fix="free some space and run the same command again: it goes on where it stopped" if full else "",
        ) from cause


@contextmanager
def _held(job: Preparation, tokenizer: Tokenizer, end: int | None, *, overwrite: bool) -> Iterator[str]:
    """Begin or go on with the folder of ``job``, alone; yield the hash of its plan, which marks what it makes.

    A folder of another plan is refused, or emptied by ``overwrite``.
    """
    plan = {
        "reads": _READS,
        "inputs": [[str(each.path.absolute()), each.format, each.size, each.changed] for each in job.inputs],
        "tokenizer": tokenizer.identity,
        "end": end,
        "key": job.reading.key,
        "separator": job.reading.separator.decode("utf-8", "replace") if job.reading.separator else None,
    }
    job.folder.mkdir(parents=True, exist_ok=True)
    with (job.folder / "lock").open("w", encoding="utf-8") as lock, _removed_unless_begun(job.folder):
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # workers that outlive a killed program do not hold it
        except (BlockingIOError, PermissionError) as cause:
            raise InputError(f"{job.prefix} is being prepared by another process") from cause
        file, mark = job.folder / _PLAN, xxhash.xxh3_64_hexdigest(json.dumps(plan).encode())
        begun = read_json(file) or {}
        old = begun.get("plan")
        replaces = overwrite or bool(begun.get("overwrite"))
        made_by_it = old == plan and (read_json(about_path(job.prefix)) or {}).get("plan") == mark  # and then killed
        inputs = [*(each.path for each in job.inputs), *files_of_tokenizer(job.tokenizer)]
        refuse_dataset(job.prefix, "--out", inputs, overwrite=replaces or made_by_it)
        if old not in (None, plan) and not overwrite:
            differing = ", ".join(key for key in plan if old.get(key) != plan[key])
            raise InputError(
                f"{job.folder} holds an unfinished preparation of something else",
                why=f"{differing} changed",
                fix="repeat the command that began it, or begin anew with --overwrite",
            )
        if old != plan:
            _remove_parts(job.folder)
        with publishing(file) as (made,):
            made.write(json.dumps({"plan": plan, "overwrite": replaces}).encode())
        yield mark


@contextmanager
def _removed_unless_begun(folder: Path) -> Iterator[None]:
    """Remove ``folder`` at the end where it has no plan: the dataset is whole, or nothing was begun.

    What is not ours stays, and so does the folder then. Whoever ends what was begun learns how it goes on.
    """
    try:
        yield
    except (KeyboardInterrupt, ToldToEnd) as end:
        if (folder / _PLAN).exists():
            end.add_note("the same command goes on where it stopped")
        raise
    finally:
        if not (folder / _PLAN).exists():
            with suppress(OSError):  # a worker that outlived a killed program may still write
                _remove_parts(folder)
                (folder / "lock").unlink()
                folder.rmdir()


def _remove_parts(folder: Path) -> None:
    for left in folder.glob("*.part"):
        left.unlink()


def _about(job: Preparation, tokenizer: Tokenizer, end: int | None, totals: Totals) -> dict[str, Any]:
    return {
        "tokenizer": job.tokenizer if job.tokenizer == "bytes" else str(Path(job.tokenizer).expanduser().absolute()),
        "identity": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": end,
        "documents": totals.documents,
        "tokens": totals.tokens,
        "inputs": [str(source.path) for source in job.inputs],
    }
