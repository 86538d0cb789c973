"""Megatron's indexed dataset: ``<prefix>.bin`` holds the tokens of all sequences, ``<prefix>.idx`` where each lies.

Byte for byte the files of megatron-core. All numbers are little-endian; n sequences form d - 1 documents:

====================  =========  ===================================================================
offset in ``.idx``    type       content
====================  =========  ===================================================================
0                     9 bytes    ``MMIDIDX`` and two zero bytes
9                     u64        version, 1
17                    u8         code of the tokens' type, see ``CODES``
18, 26                u64, u64   n and d
34                    i32 [n]    tokens of each sequence
34 + 4n               i64 [n]    byte offset of each sequence in ``.bin``
34 + 12n              i64 [d]    first sequence of each document, then n
34 + 12n + 8d         i8 [n]     mode of each sequence (its modality); only in multimodal datasets
====================  =========  ===================================================================
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeAlias

import numpy as np

from megatron_run.errors import DataError
from megatron_run.errors.wording import advice, near_path
from megatron_run.files.foreign_file import open_file
from megatron_run.files.publishing import Publication
from megatron_run_engine.data.user_files import refuse_pointer

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import ArrayLike, DTypeLike, NDArray

    Numbers: TypeAlias = NDArray[Any]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1

#: The types that tokens can have, by the code in the file.
CODES: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {
        code: np.dtype(name).newbyteorder("<")
        for code, name in enumerate(("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"), start=1)
    }
)

_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code, n, d
_CODE_AT = 17
_BLOCK = 2**16  # sequences checked at once: a megabyte of index, whatever its size


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the type in which megatron-core stores ``vocab_size`` ids: uint16 below 65500 of them, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def index_path(prefix: str | Path) -> Path:
    """Return ``<prefix>.idx``. A prefix may contain dots."""
    return Path(f"{prefix}.idx")


def tokens_path(prefix: str | Path) -> Path:
    """Return ``<prefix>.bin``. A prefix may contain dots."""
    return Path(f"{prefix}.bin")


def belongs_to_dataset(path: Path) -> bool:
    """Whether ``path`` is the file ``PREFIX.json`` beside a dataset: a folder's texts are without it."""
    prefix, _, ending = str(path).rpartition(".")
    return ending == "json" and index_path(prefix).exists() and tokens_path(prefix).exists()


class IndexedWriter:
    """Writes a dataset, sequence by sequence. As a context manager it closes, or after an error discards.

    Nothing is visible under the final names before :meth:`close`, which replaces an older dataset. ``modes``: the
    dataset is multimodal, and each sequence has a mode. The file ``beside`` appears with the dataset, or
    none of all does. Memory: 12 bytes a sequence.
    Raises :class:`DataError` for a type without a code and for a file that cannot be written.
    """

    def __init__(
        self, prefix: str | Path, dtype: DTypeLike, *, modes: bool = False, beside: Path | None = None
    ) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next((code for code, known in CODES.items() if known == self._dtype), None)
        if self._code is None:
            names = ", ".join(known.name for known in CODES.values())
            raise DataError(f"an indexed dataset cannot hold {np.dtype(dtype)}", why=f"its tokens are one of {names}")
        self._lengths, self._documents = array("i"), array("q", [0])
        self._modes = array("b") if modes else None
        with self._naming():
            between = () if beside is None else (beside,)
            self._publication = Publication(tokens_path(prefix), *between, index_path(prefix))
        self._tokens, *self._beside, self._index = self._publication.files

    def add(self, tokens: ArrayLike, mode: int = 0) -> None:
        """Append one sequence of ``tokens`` [n] to the current document.

        Raises :class:`DataError`, and appends nothing, for a token that the type cannot hold.
        """
        values = np.asarray(tokens)
        self.extend(values, (values.size,), (mode,))

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike) -> None:
        """Append documents of one sequence each: their ``tokens`` [sum(lengths)] one after the other.

        Raises as :meth:`add`.
        """
        first = len(self._lengths)
        self.extend(tokens, lengths)
        self._documents.frombytes(np.arange(first + 1, len(self._lengths) + 1, dtype=np.int64).tobytes())

    def extend(self, tokens: ArrayLike, lengths: ArrayLike, modes: ArrayLike | None = None) -> None:
        """Append sequences of ``lengths`` [k] to the current document, their ``tokens`` [sum(lengths)] in a row.

        ``modes`` [k] is 0 by default, and dropped unless the dataset has modes. Raises as :meth:`add`.
        """
        values, counts = self._cast(tokens), np.asarray(lengths, np.int64).ravel()
        if counts.sum() != values.size or (counts < 0).any():
            raise DataError(f"{values.size} tokens cannot be cut into sequences of {counts.sum()} in all")
        if counts.size and counts.max() > np.iinfo(np.int32).max:
            raise self._refused(f"has {counts.max()} tokens", "its length is kept in 32 bits")
        kinds = np.zeros(counts.size, np.int8) if modes is None else np.asarray(modes).astype(np.int8)
        with self._naming():
            self._tokens.write(values.data if values.size else b"")
        self._lengths.frombytes(counts.astype(np.int32).tobytes())
        if self._modes is not None:
            self._modes.frombytes(kinds.tobytes())

    def end_document(self) -> None:
        """End the current document after the sequences added so far."""
        self._documents.append(len(self._lengths))

    def write_beside(self, content: bytes) -> None:
        """Append ``content`` to the file beside the dataset."""
        with self._naming():
            self._beside[0].write(content)

    def close(self) -> None:
        """End the last document and put all files on disk, then under their names.

        The index comes last: where it is, the dataset is whole.
        """
        if self._documents[-1] != len(self._lengths):
            self.end_document()
        with self._naming():
            self._write_index(self._index)
            self._publication.publish()

    def discard(self) -> None:
        """Remove what was written. A dataset already there stays."""
        self._publication.discard()

    def _naming(self) -> AbstractContextManager[None]:
        return _naming(tokens_path(self._prefix), "written")

    def _cast(self, tokens: ArrayLike) -> Numbers:
        """Return ``tokens`` [n] in the type of the file, none of them changed by it."""
        values = np.asarray(tokens).ravel()
        if values.size and not np.can_cast(values.dtype, self._dtype):
            if self._dtype.kind == "f":
                return values.astype(self._dtype)
            limits = np.iinfo(self._dtype)
            for value in (values.min(), values.max()):
                if values.dtype.kind not in "iub" or not limits.min <= int(value) <= limits.max:
                    raise self._refused(
                        f"holds {value}", f"{self._dtype.name} reaches from {limits.min} to {limits.max}"
                    )
        return values.astype(self._dtype)

    def _refused(self, what: str, why: str) -> DataError:
        return DataError(f"sequence {len(self._lengths)} for {tokens_path(self._prefix)} {what}", why=why)

    def _write_index(self, file: BinaryIO) -> None:
        lengths = np.frombuffer(self._lengths, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
        file.write(_HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._documents)))
        file.write(lengths.astype("<i4").tobytes())
        file.write((ends - lengths.astype(np.int64) * self._dtype.itemsize).astype("<i8").tobytes())
        file.write(np.frombuffer(self._documents, np.int64).astype("<i8").tobytes())
        if self._modes is not None:
            file.write(self._modes.tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class IndexedReader:
    """A dataset on disk, memory-mapped. Everything that the index says is checked against the files when it is opened.

    Raises :class:`DataError`, with file and byte offset, for files that are missing, truncated, foreign or at odds with
    each other. The index is checked in blocks, so that memory does not grow with it.

    ``tokens`` [sum(lengths)]: all tokens in a row; ``lengths`` int32 [n] and ``offsets`` int64 [n] (bytes) of the
    sequences; ``documents`` int64 [d]: the first sequence of each document, then n; ``modes`` int8 [n] or None.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix, self.path = prefix, index_path(prefix)
        index, data = _mapped(self.path), _mapped(tokens_path(prefix))
        self.dtype, n, d, has_modes = self._header(index)
        self.lengths = np.frombuffer(index, "<i4", n, _HEADER.size)
        self.offsets = np.frombuffer(index, "<i8", n, _HEADER.size + 4 * n)
        self.documents = np.frombuffer(index, "<i8", d, _HEADER.size + 12 * n)
        self.modes = np.frombuffer(index, "i1", n, _HEADER.size + 12 * n + 8 * d) if has_modes else None
        end = self._check_sequences(index)
        self._check_documents(index)
        path = tokens_path(prefix)
        if end != len(data):
            missing = end > len(data)
            raise DataError(
                f"{path} {'ends' if missing else 'goes on'} at byte {len(data) if missing else end}",
                why=f"its index {self.path} describes {end} bytes, and it has {len(data)}",
                fix="copy both files of one dataset again" if missing else "give it its own index",
            )
        self.tokens: Numbers = np.frombuffer(data, self.dtype)

    def __len__(self) -> int:
        """Number of sequences, n."""
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> Numbers:
        """Return the tokens of a sequence, [lengths[sequence]], without a copy. Raises IndexError beyond the last."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)}")
        start = self.token_at(sequence)
        return self.tokens[start : start + int(self.lengths[sequence])]

    def token_at(self, sequence: int) -> int:
        """Return where ``sequence`` begins in ``tokens``; for n, where the last one ends."""
        return int(self.offsets[sequence]) // self.dtype.itemsize if sequence < len(self) else len(self.tokens)

    def token_bounds(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where each of ``sequences`` [n], which may be len(self), begins in ``tokens``, int64 [n]."""
        begins = np.full(len(sequences), len(self.tokens), np.int64)
        inside = sequences < len(self)
        begins[inside] = self.offsets[sequences[inside]] // self.dtype.itemsize
        return begins

    def _fault(self, at: int, why: str, fix: str = "write it again from its source") -> DataError:
        return DataError(f"{self.path} is damaged at byte {at}", why=why, fix=fix)

    def _header(self, index: mmap.mmap | bytes) -> tuple[np.dtype[Any], int, int, bool]:
        """Return type, n, d and whether there are modes. The counts fit the file, so they are safe to map."""
        if index[: len(MAGIC)] != MAGIC:
            raise DataError(
                f"{self.path} is no index of an indexed dataset",
                why=f"byte 0: it starts with {index[: len(MAGIC)]!r}, not {MAGIC!r}",
                fix="name the prefix of a .bin and .idx pair",
            )
        if len(index) < _HEADER.size:
            raise self._fault(len(index), f"it ends within its header of {_HEADER.size} bytes")
        _, version, code, n, d = _HEADER.unpack(index[: _HEADER.size])
        if version != VERSION:
            raise self._fault(len(MAGIC), f"version {version}, of which only {VERSION} can be read")
        if code not in CODES:
            raise self._fault(_CODE_AT, f"type code {code}, of which 1 to {len(CODES)} exist")
        size = _HEADER.size + 12 * n + 8 * d
        if len(index) not in (size, size + n):
            why = f"{n} sequences and {d} document bounds need {size} bytes, or {size + n} with modes, not {len(index)}"
            raise self._fault(min(len(index), size), why)
        return CODES[code], n, d, n > 0 and len(index) == size + n

    def _check_sequences(self, index: mmap.mmap | bytes) -> int:
        """Check lengths and offsets, in blocks; return the bytes that they describe."""
        end, n = 0, len(self)
        for first in range(0, n, _BLOCK):
            lengths, offsets = self.lengths[first : first + _BLOCK], self.offsets[first : first + _BLOCK]
            wrong = np.flatnonzero(lengths < 0)
            if wrong.size:
                place = first + int(wrong[0])
                raise self._fault(_HEADER.size + 4 * place, f"sequence {place} has {self.lengths[place]} tokens")
            ends = end + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            expected = np.concatenate([[end], ends[:-1]])
            wrong = np.flatnonzero(offsets != expected)
            if wrong.size:
                place = first + int(wrong[0])
                why = f"sequence {place} starts at byte {self.offsets[place]} of .bin, and the one before ends at "
                raise self._fault(_HEADER.size + 4 * n + 8 * place, f"{why}{expected[wrong[0]]}")
            end = int(ends[-1])
            _let_go(index)
        return end

    def _check_documents(self, index: mmap.mmap | bytes) -> None:
        """Check that the documents start at 0, never go back, and end at n."""
        at, n = _HEADER.size + 12 * len(self), len(self)
        if not len(self.documents) or self.documents[0] != 0:
            raise self._fault(at, "the first document does not start at sequence 0")
        for first in range(0, len(self.documents), _BLOCK):
            bounds = self.documents[first : first + _BLOCK + 1]
            wrong = np.flatnonzero(bounds[1:] < bounds[:-1])
            if wrong.size:
                place = first + int(wrong[0]) + 1
                before, bound = self.documents[place - 1], self.documents[place]
                raise self._fault(at + 8 * place, f"document bound {place} is {bound}, after {before}")
            _let_go(index)
        if self.documents[-1] != n:
            last = len(self.documents) - 1
            raise self._fault(at + 8 * last, f"the last document ends at sequence {self.documents[-1]} of {n}")


def prefix_of(path: str) -> Path:
    """The prefix of the dataset ``path``, one of ``data.paths``: itself, or that of one of its two files."""
    prefix = Path(path).expanduser()
    return prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix


def files_of(paths: Iterable[str]) -> tuple[Path, ...]:
    """Both files of each dataset of ``paths``."""
    prefixes = [prefix_of(path) for path in paths]
    return tuple(file for prefix in prefixes for file in (tokens_path(prefix), index_path(prefix)))


def open_tokens(path: str) -> IndexedReader:
    """Open the dataset of token ids ``path``, one of ``data.paths``: a prefix, or the name of one of its two files.

    Raises :class:`DataError` for files that are missing, damaged, or hold other numbers.
    """
    try:
        reader = IndexedReader(prefix_of(path))
    except DataError as error:
        error.origin = error.origin or "data.paths"
        raise
    if reader.dtype.kind == "f":
        raise DataError(
            f"{reader.path} holds {reader.dtype.name}, and token ids are whole numbers", origin="data.paths"
        )
    return reader


@contextmanager
def _naming(path: Path, done: str) -> Iterator[None]:
    """Raise :class:`DataError` with the path for an error of the operating system."""
    try:
        yield
    except OSError as cause:
        raise DataError(f"{path} cannot be {done}", why=cause.strerror or str(cause)) from cause


def _mapped(path: Path) -> mmap.mmap | bytes:
    """Return the contents of the file, mapped: read when they are touched. An empty file cannot be mapped."""
    if not path.exists():
        fix = _prefix_meant(path)
        raise DataError(f"{path} does not exist", why="an indexed dataset is a pair of files", fix=fix)
    with _naming(path, "read"), open_file(path) as file:
        refuse_pointer(path)
        size = os.fstat(file.fileno()).st_size
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def _prefix_meant(path: Path) -> str:
    """The advice where there is no ``path`` of a dataset: perhaps one of its files was named, and not their prefix."""
    named = path.with_suffix("")
    if named.suffix in (".bin", ".idx") and named.exists():
        return f"name the prefix of both: {named.with_suffix('')}"
    partner = path.with_suffix(".bin" if path.suffix == ".idx" else ".idx")
    meant = "" if partner.exists() else near_path(path)
    return advice(meant, "name the prefix that <prefix>.bin and <prefix>.idx share")


def _let_go(mapped: mmap.mmap | bytes) -> None:
    """Take the pages that were read out of this process; the operating system's cache keeps them."""
    if isinstance(mapped, mmap.mmap):
        mapped.madvise(mmap.MADV_DONTNEED)
