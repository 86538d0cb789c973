"""Safetensors files: a JSON header that says where each tensor lies, then the bytes of all tensors without a gap.

Eight bytes hold the length of the header, little-endian. The format is Hugging Face's, so that every tool that knows it
reads our shards (https://huggingface.co/docs/safetensors, "Format"). No byte of such a file is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.files import reading, size_of

#: The types of values by their names in a file, with the bytes of one value.
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U8": 1,
        "BOOL": 1,
    }
)
#: The longest header that is read, in bytes; the format's own limit.
LONGEST_HEADER = 100_000_000
#: As many as torch has.
MOST_DIMENSIONS = 64


class Entry(NamedTuple):
    """One tensor of a file; ``start`` is its first byte, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """The byte after its last."""
        return self.start + ITEM_BYTES[self.dtype] * prod(self.shape)


class Header(NamedTuple):
    """The tensors of a file by name; ``data`` is the offset of the first byte after the header."""

    entries: Mapping[str, Entry]
    data: int


def lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Entry]:
    """Where tensors (name -> type, shape) go in a file: the widest types first, so that each value is aligned."""
    entries: dict[str, Entry] = {}
    start = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1][0]]):
        entries[name] = Entry(dtype, shape, start)
        start = entries[name].stop
    return entries


def encode_header(entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """What stands before the data, padded to a multiple of eight bytes; ``metadata`` are texts for other tools."""
    records: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for name, entry in entries.items():
        records[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.start, entry.stop)}
    text = json.dumps(records, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> Header:
    """The header of the file at ``path``. Raises :class:`CheckpointError` naming the file and what is wrong with it."""
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


def _entry(record: Mapping[str, Any]) -> Entry:
    dtype, shape, (start, stop) = record["dtype"], tuple(record["shape"]), record["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise ValueError(f"values of type {str(dtype)[:20]!r}")
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, start, stop)):
        raise ValueError("a shape or an offset that is no whole number")
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(shape)} dimensions")
    entry = Entry(dtype, shape, start)
    if entry.stop != stop:
        raise ValueError(f"{stop - start} bytes for {prod(shape)} values of type {dtype}")
    return entry


def _check_gapless(entries: Mapping[str, Entry], size: int) -> None:
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
