"""From files to samples: finds documents, splits them, packs a split end to end, and cuts it into samples.

Files, folders and patterns are listed in an order that no file system decides. Whether a document is for training,
validation or test follows from its contents alone: adding, removing or renaming a file never moves another one, and
files with equal contents fall into the same split. The bigram model of a split is the baseline that a trained language
model must beat.
"""

from __future__ import annotations

import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_run.errors import DataError, InputError
from megatron_run.errors.wording import near_path
from megatron_run_engine.data.indexed_files import belongs_to_dataset
from megatron_run_engine.data.option_types import SPLITS
from megatron_run_engine.data.user_files import file_lines, foreign, json_line, read_bytes, start_of, unreadable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_run.contracts.data import Split
    from megatron_run_engine.data.tokenizer_base import Tokenizer


_LOG = logging.getLogger("megatron_run")


#: How the names of JSON lines end.
RECORDS = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Document:
    """One file of text, which is not compressed, or of JSON lines with a text each."""

    path: Path

    @property
    def has_records(self) -> bool:
        """Whether it holds JSON lines, by its name."""
        return self.path.suffix.lower() in RECORDS

    def read(self) -> bytes:
        """Return its bytes without a mark. Raises :class:`DataError` if it cannot be read."""
        return read_bytes(self.path, "data.paths")

    def contents(self) -> Iterator[tuple[str, bytes]]:
        """Yield (place, content) of its text; of JSON lines what each has under ``text``.

        Raises :class:`DataError` as :meth:`read`, and for a line without such a text.
        """
        if not self.has_records:
            yield str(self.path), self.read()
            return
        for number, line in file_lines(self.path, "data.paths"):
            if line.strip():
                place = f"{self.path}:{number}"
                yield place, _text_of(line, place).encode()

    def texts(self) -> Iterator[str]:
        """Yield its :meth:`contents`, with U+FFFD for what is not UTF-8."""
        return (content.decode(errors="replace") for _, content in self.contents())


class NoTextError(DataError):
    """A JSON line without a text: another plugin may read it."""


def _text_of(line: bytes, place: str) -> str:
    try:
        record = json_line(line)
    except ValueError as cause:
        raise DataError(f"{place} is no record", why=str(cause), origin="data.paths") from cause
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise NoTextError(f"{place} is no record with a text", why=_NO_TEXT, origin="data.paths", fix=_OTHERS)
    return str(record["text"])


#: Why JSON lines are not texts, and what reads them.
_NO_TEXT = "of JSON lines data=text reads the key 'text'"
_OTHERS = "for conversations add --plugin data=instruct; megatron-run data prepare reads other keys"


def require_texts(paths: Sequence[Path]) -> None:
    """Raise :class:`InputError` for JSON lines whose first one has no text: another plugin reads them."""
    for document in map(Document, paths):
        try:
            next(document.contents() if document.has_records else iter(()), None)
        except NoTextError as cause:
            raise InputError(cause.what, why=_NO_TEXT, origin="data.paths", fix=_OTHERS) from cause


def check_names(names: Sequence[str]) -> None:
    """Raise :class:`DataError` for the first of ``names`` that is no pattern and is not there."""
    for path in (Path(name).expanduser() for name in names if not has_magic(name)):
        if not path.exists():
            raise _missing(path)


def find_documents(names: Sequence[str]) -> tuple[Document, ...]:
    """Return the documents of ``names`` in the order of the names, sorted within each name, each file once.

    A name is a file, a pattern (``src/**/*.py``), or a folder, which stands for all text files beneath it except empty
    and hidden ones; links are followed. Raises :class:`DataError` if a name matches nothing.
    """
    found: dict[Path, Document] = {}
    for name in names:
        for path in _files(name):
            found.setdefault(path.resolve(), Document(path))
    return tuple(found.values())


def _files(name: str) -> Sequence[Path]:
    path = Path(os.path.expanduser(name))  # noqa: PTH111  # Path.expanduser raises for a user that does not exist
    if path.is_dir():
        return _at_least_one(text_files(path), f"folder {path} holds no text file")
    if path.is_file():
        if not path.stat().st_size:
            raise DataError(f"data file {path} is empty", origin="data.paths")
        if what := foreign(_start(path)):
            fix = "name text files; megatron-run data prepare reads .gz, .zst and .parquet too"
            raise DataError(f"data file {path} is not text", why=what.why, origin="data.paths", fix=fix)
        return [path]
    if has_magic(name):
        matches = sorted(Path(match) for match in glob(str(path), recursive=True))  # noqa: PTH207  # absolute too
        return _at_least_one(
            [match for match in matches if _holds_text(match) and not belongs_to_dataset(match)],
            f"{name} matches no text file",
        )
    raise _missing(path)


def _at_least_one(paths: Sequence[Path], otherwise: str) -> Sequence[Path]:
    if not paths:
        raise DataError(otherwise, origin="data.paths", fix="name files, folders or patterns such as 'src/**/*.py'")
    return paths


def _missing(path: Path) -> DataError:
    if path.exists():
        return DataError(f"{path} is neither a file nor a folder", origin="data.paths")
    if path.is_symlink():
        return DataError(f"data file {path} cannot be read", why=_broken(path), origin="data.paths")
    return DataError(f"data file {path} does not exist", origin="data.paths", fix=near_path(path))


def _broken(link: Path) -> str:
    """Why ``link`` leads nowhere."""
    target = os.readlink(link)  # noqa: PTH115  # the text as it was written
    try:
        link.stat()
    except FileNotFoundError:
        return f"it is a link to {target}, which does not exist"
    except OSError as cause:
        return f"it is a link to {target}: {cause.strerror}"  # ELOOP: too many levels of symbolic links
    return f"it is a link to {target}"


def text_files(folder: Path, without: frozenset[str] = frozenset()) -> list[Path]:
    """Return the text files beneath ``folder`` that are neither empty nor hidden, sorted by the parts of their path.

    Folders named in ``without`` are skipped. Raises :class:`DataError` if a folder or file cannot be read.
    """
    return sorted((path for path in _walk(folder, without) if _holds_text(path)), key=lambda path: path.parts)


def _walk(folder: Path, without: frozenset[str]) -> Iterator[Path]:
    without |= {"__pycache__"}

    def fail(cause: OSError) -> None:
        raise unreadable(Path(cause.filename), cause, "data.paths") from cause

    seen: set[Path] = set()  # a link may lead to a folder around it, or to one that is walked anyway
    for parent, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        here = Path(parent).resolve()
        if here in seen:
            folders[:] = []
            continue
        seen.add(here)
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        paths = (Path(parent, name) for name in files if not name.startswith("."))
        for path in paths:
            if belongs_to_dataset(path):
                continue
            if path.is_symlink() and not path.exists():
                _LOG.warning("%s is left out: %s", path, _broken(path))
            yield path


def _holds_text(path: Path) -> bool:
    """Whether ``path`` is a file that is not empty and begins as text does."""
    if not path.is_file():
        return False
    start = _start(path)
    return bool(start) and foreign(start) is None


def _start(path: Path) -> bytes:
    try:
        return start_of(path)
    except DataError as error:
        error.origin = "data.paths"
        raise


#: Skipped folders: installed packages, tests, applications, generated tables, and modules that newer Pythons dropped.
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "tkinter", "encodings", "pydoc_data"}
    | {"ensurepip", "lib2to3", "distutils"}
)


def standard_library() -> tuple[Document, ...]:
    """Return the ``*.py`` files of the standard library, sorted: some 9 MB that depend only on the Python version.

    Raises :class:`DataError` if this Python has no sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = text_files(folder, without=LEFT_OUT)
    documents = tuple(Document(path) for path in files if _belongs(path.relative_to(folder)))
    if documents:
        return documents
    raise DataError(f"{folder} holds no Python sources", why="data.paths is empty", fix="set data.paths to your texts")


def _belongs(path: Path) -> bool:
    """Whether a file of the library was written by people. The build generates ``_sysconfigdata`` and ``config-*``."""
    return path.suffix == ".py" and not path.parts[0].startswith(("_sysconfigdata", "config-"))


#: Bytes of text that are tokenised at once, so that memory does not grow with the text.
BATCH = 2**24


def split_streams(
    contents: Iterable[tuple[object, bytes]], tokenizer: Tokenizer, shares: Shares, *, cut: bool = False
) -> Iterator[tuple[Split, NDArray[Any]]]:
    """Yield the token streams of all splits piece by piece, from one reading of the documents (path, content).

    ``cut``: documents are, whatever their size. Raises :class:`DataError` as :func:`pack` does.
    """
    waiting: dict[Split, list[tuple[object, bytes]]] = {split: [] for split in SPLITS}
    size = 0
    for path, content in contents:
        for split, portion in shares.portions(content, cut=cut):
            waiting[split].append((path, portion))
        size += len(content)
        if size >= BATCH:
            yield from ((split, pack(parts, tokenizer)) for split, parts in waiting.items() if parts)
            waiting, size = {split: [] for split in SPLITS}, 0
    yield from ((split, pack(parts, tokenizer)) for split, parts in waiting.items() if parts)


def token_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    """The smallest unsigned type that holds the vocabulary."""
    return np.min_scalar_type(tokenizer.vocab_size - 1)


def pack(documents: Sequence[tuple[object, bytes]], tokenizer: Tokenizer) -> NDArray[Any]:
    """Return the token ids of the documents ``(source, content)``, [n], with an end-of-document token after each.

    Raises :class:`DataError` naming the source and offset of an id outside the vocabulary.
    """
    dtype = token_type(tokenizer)
    end = np.array([tokenizer.end_of_document], dtype)
    parts = [np.empty(0, dtype)]
    for (source, _), tokens in zip(documents, tokenizer.encode_batch(documents), strict=True):
        require_within(tokens, tokenizer.vocab_size, source)
        parts += [tokens.astype(dtype), end]
    return np.concatenate(parts)


def require_within(tokens: NDArray[np.integer[Any]], vocab_size: int, source: object) -> None:
    """Raise :class:`DataError` naming ``source`` and offset of the first id outside ``0..vocab_size-1``."""
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if outside.size:
        offset = int(outside[0])
        raise DataError(
            f"{source} holds token id {tokens[offset]} at token {offset}",
            why=f"the vocabulary has {vocab_size} ids",
            fix="use the tokenizer that the model was made for",
        )


class PackedDataset:
    """Samples of ``sequence_length`` from a stream: sample i reads the s + 1 tokens from i * s on.

    Neighbouring samples share one token, the last label of one and the first token of the next. So every token but the
    very first is a label once. The rest of the stream that fills no sample is dropped.
    """

    def __init__(self, stream: NDArray[Any], sequence_length: int) -> None:
        self._stream, self._length = stream, sequence_length

    def __len__(self) -> int:
        return max(0, (len(self._stream) - 1) // self._length)

    def __getitem__(self, index: int) -> Mapping[str, NDArray[np.generic]]:
        """``tokens`` and ``labels`` int64 [s], ``loss_mask`` fp32 [s]."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self._length
        window = self._stream[start : start + self._length + 1].astype(np.int64)
        return {"tokens": window[:-1], "labels": window[1:], "loss_mask": np.ones(self._length, np.float32)}

    def pairs(self, samples: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (tokens, labels) of ``samples``, in their order, each [len(samples) * s]."""
        starts = np.asarray(samples, dtype=np.int64)[:, None] * self._length  # [n, 1]
        places = (starts + np.arange(self._length)).ravel()  # [n * s]
        return self._stream[places].astype(np.int64), self._stream[places + 1].astype(np.int64)


#: A document of at least this many bytes is cut into the shares of all splits. A smaller one goes to one split whole.
CUT_FROM = 256 * 1024


@dataclass(frozen=True)
class Shares:
    """How much of the data each split gets, in any unit: 90, 5, 5 is 0.9, 0.05, 0.05."""

    train: float
    validation: float
    test: float

    def bounds(self, split: Split) -> tuple[float, float]:
        """Return the part of [0, 1) that ``split`` covers."""
        shares = (self.train, self.validation, self.test)
        total, place = sum(shares), SPLITS.index(split)
        return sum(shares[:place]) / total, sum(shares[: place + 1]) / total

    def share(self, split: Split) -> float:
        """Return the share of ``split``, from 0 to 1."""
        low, high = self.bounds(split)
        return high - low

    def holds(self, content: bytes, split: Split) -> bool:
        """Whether a document that is not cut belongs to ``split``."""
        low, high = self.bounds(split)
        return low <= _place_of(content) < high

    def portions(self, content: bytes, *, cut: bool = False) -> Iterator[tuple[Split, bytes]]:
        """Yield the parts of a document: all of it for one split, or each split's share if it is cut (``CUT_FROM``)."""
        cut = cut or len(content) >= CUT_FROM
        place = 0.0 if cut else _place_of(content)
        for split in SPLITS:
            low, high = self.bounds(split)
            part = content[_boundary(content, low) : _boundary(content, high)] if cut else content
            if part and (cut or low <= place < high):
                yield split, part


def _place_of(content: bytes) -> float:
    """Return a number in [0, 1) that depends only on the contents."""
    return int.from_bytes(sha256(content).digest()[:6], "big") / 2**48  # 48 bits: exact in a float, never 1.0


def _boundary(content: bytes, share: float) -> int:
    """Return the offset at which the first ``share`` of ``content`` ends, never within a UTF-8 character."""
    offset = round(len(content) * share)
    # Skip continuation bytes, of which a character has at most three.
    following = content[offset : offset + 3]
    return offset + len(following) - len(following.lstrip(bytes(range(0x80, 0xC0))))


#: Added to the count of every pair, so that an unseen pair has a probability above zero.
SMOOTHING = 0.1


class Bigram:
    """P(label | token) = (count(token, label) + a) / (count(token) + a * V), additive smoothing with a = SMOOTHING.

    Only pairs that occur are stored, so that a vocabulary V of any size fits. ``tokens`` and ``labels`` are [n].
    """

    def __init__(self, tokens: NDArray[np.int64], labels: NDArray[np.int64], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._pairs, self._pair_counts = np.unique(tokens * vocab_size + labels, return_counts=True)
        self._token_counts = np.bincount(tokens, minlength=vocab_size)

    def loss(self, tokens: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
        """Return the mean of -log P(label | token) over [n] tokens and labels, in nats per token."""
        pairs, times = np.unique(tokens * self._vocab_size + labels, return_counts=True)
        places = np.searchsorted(self._pairs, pairs).clip(max=len(self._pairs) - 1)
        counts = np.where(self._pairs[places] == pairs, self._pair_counts[places], 0)
        totals = self._token_counts[pairs // self._vocab_size]
        probabilities = (counts + SMOOTHING) / (totals + SMOOTHING * self._vocab_size)
        return float(-(times * np.log(probabilities)).sum() / times.sum())
