"""One rank's shard: its boxes written as a safetensors file that is hashed on the way to the disk."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_run_engine.checkpoint.boxes import Box
from megatron_run_engine.checkpoint.files import unwatched
from megatron_run_engine.checkpoint.header import Entry, encode_header, lay_out

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts.state import StatePiece
    from megatron_run_engine.checkpoint.files import FileSystem

#: Types of tensors by their names in a file.
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
#: Bytes of a file for which another file, and the thread that hashes it, is worth its while.
LEAST = 1 << 26
#: Bytes that are brought to the host, hashed and written at once; larger stretches would leave the processor's caches.
_AT_ONCE = 1 << 22
#: Stretches that may be written before they are hashed. What comes from a device is held on the host meanwhile.
_AHEAD = 4


class Written(NamedTuple):
    """A file as it was given to the disk."""

    bytes: int
    sha256: str


def file_name(rank: int, part: int = 0) -> str:
    """The shard of ``rank``: ``rank-00003.safetensors``; its further files: ``rank-00003-1.safetensors``."""
    return f"rank-{rank:05d}-{part}.safetensors" if part else f"rank-{rank:05d}.safetensors"


def deal(pieces: Sequence[StatePiece], most: int) -> list[list[StatePiece]]:
    """``pieces`` for several files of about one length, ``most`` at most, none of which is small.

    Each is hashed by a thread of its own, when it is written and when it is read: one hashes slower than disks read.
    """
    total = sum(piece.tensor.nbytes for piece in pieces)
    hands: list[list[StatePiece]] = [[] for _ in range(max(1, min(most, total // LEAST)))]
    sizes = [0] * len(hands)
    for piece in sorted(pieces, key=lambda piece: -piece.tensor.nbytes):
        emptiest = sizes.index(min(sizes))
        hands[emptiest].append(piece)
        sizes[emptiest] += piece.tensor.nbytes
    return hands


def tensor_name(name: str, field: str, box: Box) -> str:
    """What a box is called in a shard: ``embedding.word.weight:exp_avg[0:64,0:32]``."""
    return f"{name}:{field}{box}"


def by_name(pieces: Iterable[StatePiece]) -> dict[str, StatePiece]:
    """The boxes of a shard by the names that they have in it."""
    named = [(tensor_name(piece.name, piece.field, Box(piece.starts, piece.sizes)), piece) for piece in pieces]
    found = dict(named)
    assert len(found) == len(named), "no box is given twice"
    return found


def place(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Where ``tensors`` lie in their file, by name, in the order of the file."""
    return lay_out({name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()})


def write_shard(
    path: Path, pieces: Iterable[StatePiece], files: FileSystem, heartbeat: Callable[[], None] = unwatched
) -> Written:
    """Write ``pieces`` to the new file ``path``, return when they are on the disk. Raises OSError naming the path.

    ``heartbeat`` is called whenever a stretch of it is written, maybe by another thread.
    """
    tensors = {name: piece.tensor for name, piece in by_name(pieces).items()}
    return write_tensors(path, tensors, files, heartbeat=heartbeat)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    files: FileSystem,
    metadata: Mapping[str, str] | None = None,
    heartbeat: Callable[[], None] = unwatched,
) -> Written:
    """Write ``tensors`` by name to the new file ``path``, return when they are on the disk. Raises OSError."""
    entries = place(tensors)
    header = encode_header(entries, metadata)
    total, size = hashlib.sha256(), 0
    with files.create(path) as file, ThreadPoolExecutor(1) as hasher:
        waiting: deque[Future[None]] = deque()
        for batch in _batches(_content(header, (tensors[name] for name in entries))):
            waiting.append(hasher.submit(_hash, total, batch))  # beside the writes: neither holds the interpreter
            for data in batch:
                file.write(data)
                size += len(data)
            if len(waiting) > _AHEAD:
                waiting.popleft().result()
            heartbeat()
        for rest in waiting:
            rest.result()
        file.sync()
    return Written(size, total.hexdigest())


def _hash(total: hashlib._Hash, batch: Sequence[memoryview]) -> None:
    for data in batch:
        total.update(data)


def _batches(content: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Stretches that are handed over together: of many small boxes each would cost more to hand over than to hash."""
    batch, size = list[memoryview](), 0
    for data in content:
        batch.append(data)
        size += len(data)
        if size >= _AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _content(header: bytes, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of a file, one stretch after the other. What is contiguous on the host is not copied."""
    yield memoryview(header)
    for tensor in tensors:
        for part in tensor.detach().reshape(-1).split(_AT_ONCE // tensor.element_size()):
            dense = part if part.stride(0) == 1 else part.clone(memory_format=torch.contiguous_format)
            yield memoryview(dense.cpu().view(torch.uint8).numpy())
