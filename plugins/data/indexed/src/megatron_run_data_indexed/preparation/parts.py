"""The tokens of one block on disk: written whole or not at all, and known to be whole when they are read.

tokens | lengths int32 | record, JSON | length of the record u64, xxh3 of all that precedes u64, magic
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_run.files.foreign_file import open_file
from megatron_run.files.publishing import publishing

_MAGIC = b"MRPART01"
_END = struct.Struct("<QQ8s")


@dataclass(frozen=True)
class Account:
    """The account of a block: its ``records``, and how many of them are ``documents`` or ``empty``.

    ``faults`` are the malformed ones, (number within the block, why), ``kept`` as documents or left out. ``tokens``
    counts the ends of documents too, ``lost`` the characters that have none.
    """

    records: int
    documents: int
    empty: int
    tokens: int
    faults: tuple[tuple[int, str], ...] = ()
    kept: bool = False
    lost: int = 0


def write_part(path: Path, plan: int, tokens: NDArray[Any], lengths: NDArray[np.int32], account: Account) -> None:
    """Write a part of the preparation ``plan``, a number of 64 bits. Raises :class:`OSError`."""
    record = json.dumps(asdict(account)).encode()
    body = (tokens.data, lengths.astype("<i4").data, record, struct.pack("<Q", len(record)))
    checksum = xxhash.xxh3_64(seed=plan)
    with publishing(path, durable=False) as (file,):
        for piece in body:
            if len(piece):  # numpy gives an empty array no buffer that xxhash takes
                checksum.update(piece)
                file.write(piece)
        file.write(struct.pack("<Q8s", checksum.intdigest(), _MAGIC))


def read_part(path: Path, plan: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.int32], Account] | None:
    """Map a part: (tokens, lengths, account). None if there is none of ``plan``, or it is damaged."""
    try:
        with open_file(path) as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (FileNotFoundError, ValueError):  # ValueError: it is empty
        return None
    if len(content) < _END.size:
        return None
    length, checksum, magic = _END.unpack(content[-_END.size :])
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(content[:-16], seed=plan) != checksum:
        return None
    account = json.loads(bytes(content[-_END.size - length : -_END.size]))
    account["faults"] = tuple((number, why) for number, why in account["faults"])
    about = Account(**account)
    size = about.tokens * dtype.itemsize
    tokens = np.frombuffer(content[:size], dtype)
    return tokens, np.frombuffer(content[size : size + 4 * about.documents], "<i4"), about
