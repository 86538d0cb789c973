"""Shard files: one rank's boxes in safetensors format, hashed while they are written.

The safetensors library is no dependency: its writer neither hashes nor syncs, needs the whole file in memory or
contiguous tensors, and its reader of headers is sixty lines here, which name the file and the fault.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.boxes import Box
from megatron_run_engine.checkpoint.files import Hash, no_heartbeat, reading, size_of
from megatron_run_engine.checkpoint.manifest import ITEM_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts.optimizer import StatePiece
    from megatron_run_engine.checkpoint.files import FileSystem


#: The longest header that is read, in bytes: the limit of the format.
LONGEST_HEADER = 100_000_000
#: The limit of torch.
MOST_DIMENSIONS = 64


class TensorEntry(NamedTuple):
    """One tensor of a file. ``start`` is the offset of its first byte from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """The offset after its last byte."""
        return self.start + ITEM_BYTES[self.dtype] * prod(self.shape)


class Header(NamedTuple):
    """The tensors of a file by name. ``data`` is the offset of the first byte after the header."""

    entries: Mapping[str, TensorEntry]
    data: int


def lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorEntry]:
    """Place tensors (name -> type, shape) in a file, the widest types first, so that every value is aligned."""
    entries: dict[str, TensorEntry] = {}
    start = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1][0]]):
        entries[name] = TensorEntry(dtype, shape, start)
        start = entries[name].stop
    return entries


def encode_header(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes before the data, padded to a multiple of eight. ``metadata`` are texts for other tools."""
    records: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for name, entry in entries.items():
        records[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.start, entry.stop)}
    text = json.dumps(records, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> Header:
    """Return the header of the file at ``path``. Raises :class:`CheckpointError` naming the file and the fault."""
    with reading(path) as file:
        size = size_of(file)
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, LONGEST_HEADER):
            raise _broken(path, f"a header of {length} bytes in a file of {size}")
        text = file.read(length)
    try:
        records = json.loads(text, object_pairs_hook=_without_duplicates)
        entries = {name: _entry(record) for name, record in records.items() if name != "__metadata__"}
        _check_gapless(entries, size - 8 - length)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _broken(path, f"{type(error).__name__}: {error}") from error
    return Header(entries, 8 + length)


def _entry(record: Mapping[str, Any]) -> TensorEntry:
    dtype, shape, (start, stop) = record["dtype"], tuple(record["shape"]), record["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise ValueError(f"values of type {str(dtype)[:20]!r}")
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, start, stop)):
        raise ValueError("a shape or an offset that is no whole number")
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(shape)} dimensions")
    entry = TensorEntry(dtype, shape, start)
    if entry.stop != stop:
        raise ValueError(f"{stop - start} bytes for {prod(shape)} values of type {dtype}")
    return entry


def _check_gapless(entries: Mapping[str, TensorEntry], size: int) -> None:
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise ValueError(f"tensor {name[:200]!r} starts at byte {entry.start} of the data, expected {end}")
        end = entry.stop
    if end != size:
        raise ValueError(f"{size} bytes of data, the header speaks of {end}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name that stands there twice")
    return found


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is no intact safetensors file", why=why)


#: Torch types by their names in a file.
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
#: The smallest size in bytes for which a further file, with a thread to hash it, pays.
LEAST = 1 << 26
#: Bytes copied to the host, hashed and written at once. Larger blocks would leave the processor's caches.
_BLOCK = 1 << 22
#: Batches that may be written before they are hashed. Until then they are held in host memory.
_AHEAD = 4


class Written(NamedTuple):
    """The length of a written file, and its hashes: SHA-256, which proves it to anybody, and XXH3, which is fast."""

    bytes: int
    sha256: str
    xxh3: str


def file_name(rank: int, part: int = 0) -> str:
    """Return the name of a shard of ``rank``: ``rank-00003.safetensors``, for part 1 ``rank-00003-1.safetensors``."""
    return f"rank-{rank:05d}-{part}.safetensors" if part else f"rank-{rank:05d}.safetensors"


def split_into_files(pieces: Sequence[StatePiece], most: int) -> list[list[StatePiece]]:
    """Split ``pieces`` into at most ``most`` files of about equal length, none of them small.

    Each file is hashed by its own thread when it is written and when it is read: one thread hashes slower than a fast
    disk reads.
    """
    total = sum(piece.tensor.nbytes for piece in pieces)
    files: list[list[StatePiece]] = [[] for _ in range(max(1, min(most, total // LEAST)))]
    sizes = [0] * len(files)
    for piece in sorted(pieces, key=lambda piece: -piece.tensor.nbytes):  # the largest first, each to the emptiest file
        emptiest = sizes.index(min(sizes))
        files[emptiest].append(piece)
        sizes[emptiest] += piece.tensor.nbytes
    return files


def tensor_name(name: str, field: str, box: Box) -> str:
    """Return the name of a box in a shard: ``embedding.word.weight:exp_avg[0:64,0:32]``."""
    return f"{name}:{field}{box}"


def by_name(pieces: Iterable[StatePiece]) -> dict[str, StatePiece]:
    """Return the boxes of a shard by their names in it."""
    named = [(tensor_name(piece.name, piece.field, Box(piece.starts, piece.sizes)), piece) for piece in pieces]
    found = dict(named)
    assert len(found) == len(named), "no box is given twice"
    return found


def place(tensors: Mapping[str, Tensor], *, widen: bool = False) -> dict[str, TensorEntry]:
    """Return where ``tensors`` lie in their file, by name, in the order of the file."""
    types = {name: NAMES[written_type(tensor, widen=widen)] for name, tensor in tensors.items()}
    return lay_out({name: (types[name], tuple(tensor.shape)) for name, tensor in tensors.items()})


def written_type(tensor: Tensor, *, widen: bool) -> torch.dtype:
    """Return the type in which ``tensor`` is written: its own, or fp32 if ``widen`` and it is bf16 or fp16."""
    return torch.float32 if widen and tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype


def write_shard(
    path: Path,
    pieces: Iterable[StatePiece],
    files: FileSystem,
    heartbeat: Callable[[], None] = no_heartbeat,
    *,
    widen: bool = False,
) -> Written:
    """Write ``pieces`` to the new file ``path`` and return when it is on disk. Raises OSError naming the path.

    ``heartbeat`` is called after every batch, possibly in another thread than the caller's. With ``widen``, 16-bit
    values are written as fp32, without ever being a tensor of it in memory.
    """
    tensors = {name: piece.tensor for name, piece in by_name(pieces).items()}
    return write_tensors(path, tensors, files, heartbeat=heartbeat, widen=widen)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    files: FileSystem,
    metadata: Mapping[str, str] | None = None,
    heartbeat: Callable[[], None] = no_heartbeat,
    *,
    widen: bool = False,
) -> Written:
    """Write ``tensors`` by name to the new file ``path`` and return when it is on disk. Raises OSError."""
    entries = place(tensors, widen=widen)
    header = encode_header(entries, metadata)
    totals, size = (hashlib.sha256(), xxhash.xxh3_128()), 0
    with files.create(path) as file, ThreadPoolExecutor(1) as hasher:
        waiting: deque[Future[None]] = deque()
        for batch in _batches(_content(header, (tensors[name] for name in entries), widen=widen)):
            # Hash and write in parallel: both release the GIL.
            waiting.append(hasher.submit(_hash, totals, batch))
            for data in batch:
                file.write(data)
                size += len(data)
            if len(waiting) > _AHEAD:
                waiting.popleft().result()
            heartbeat()
        for rest in waiting:
            rest.result()
        file.sync()
    return Written(size, *(total.hexdigest() for total in totals))


def _hash(totals: Iterable[Hash], batch: Sequence[memoryview]) -> None:
    for data in batch:
        for total in totals:  # the second finds the block in the processor's cache
            total.update(data)


def _batches(content: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Group blocks into batches no larger than one: small boxes handed over one by one cost more than their hashes."""
    batch, size = list[memoryview](), 0
    for data in content:
        if batch and size + len(data) > _BLOCK:
            yield batch
            batch, size = [], 0
        batch.append(data)
        size += len(data)
    if batch:
        yield batch


def _content(header: bytes, tensors: Iterable[Tensor], *, widen: bool) -> Iterator[memoryview]:
    """Yield the bytes of a file block by block. Contiguous host tensors that keep their type are not copied."""
    yield memoryview(header)
    for tensor in tensors:
        dtype = written_type(tensor, widen=widen)
        for part in tensor.detach().reshape(-1).split(_BLOCK // dtype.itemsize):
            dense = part if part.stride(0) == 1 else part.clone(memory_format=torch.contiguous_format)
            yield memoryview(dense.cpu().to(dtype).view(torch.uint8).numpy())
