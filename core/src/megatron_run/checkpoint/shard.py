"""One rank's shard: its boxes written as a safetensors file that is hashed on the way to the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_run.checkpoint.boxes import Box
from megatron_run.checkpoint.header import encode_header, lay_out

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.checkpoint.files import FileSystem
    from megatron_run.contracts.state import StatePiece

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
#: Values that cross from a device to the host at once.
_AT_ONCE = 1 << 24


class Written(NamedTuple):
    """A file as it was given to the disk."""

    bytes: int
    sha256: str


def file_name(rank: int) -> str:
    """The shard of ``rank``: ``rank-00003.safetensors``."""
    return f"rank-{rank:05d}.safetensors"


def tensor_name(name: str, field: str, box: Box) -> str:
    """What a box is called in a shard: ``embedding.word.weight:exp_avg[0:64,0:32]``."""
    return f"{name}:{field}{box}"


def write_shard(path: Path, pieces: Sequence[StatePiece], files: FileSystem) -> Written:
    """Write ``pieces`` to the new file ``path``, return when they are on the disk. Raises OSError naming the path."""
    tensors = {tensor_name(piece.name, piece.field, Box(piece.starts, piece.sizes)): piece.tensor for piece in pieces}
    assert len(tensors) == len(pieces), "no box is given twice"
    return write_tensors(path, tensors, files)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], files: FileSystem, metadata: Mapping[str, str] | None = None
) -> Written:
    """Write ``tensors`` by name to the new file ``path``, return when they are on the disk. Raises OSError."""
    entries = lay_out({name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()})
    total, size = hashlib.sha256(), 0
    with files.create(path) as file, ThreadPoolExecutor(1) as hasher:
        for data in _content(encode_header(entries, metadata), (tensors[name] for name in entries)):
            hashed = hasher.submit(total.update, data)  # beside the write: neither holds the interpreter
            file.write(data)
            hashed.result()
            size += len(data)
        file.sync()
    return Written(size, total.hexdigest())


def _content(header: bytes, tensors: Iterator[Tensor]) -> Iterator[memoryview]:
    """The bytes of a file, one stretch after the other. What is contiguous on the host is not copied."""
    yield memoryview(header)
    for tensor in tensors:
        for part in tensor.detach().reshape(-1).split(_AT_ONCE):
            dense = part if part.stride(0) == 1 else part.clone(memory_format=torch.contiguous_format)
            yield memoryview(dense.cpu().view(torch.uint8).numpy())
