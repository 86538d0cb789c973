"""Files on their way between ranks, block by block: a rank holds one block of what it sends and one of what comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import xxhash

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.files import FileSystem, no_heartbeat, reading

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run_engine.checkpoint.hosts import Transfer
    from megatron_run_engine.checkpoint.manifest import Manifest

#: Bytes sent at once.
_BLOCK = 1 << 24
#: What a file is called until all of it has come.
_ARRIVING = ".get-"


class Transport(Protocol):
    """Bytes between two ranks."""

    def send(self, data: Tensor, target: int) -> None:
        """Send ``data``, and return when they have left."""

    def receive(self, data: Tensor, source: int) -> None:
        """Fill ``data`` with what ``source`` sends."""


class Blocks:
    """Memory for a block that leaves and one that comes. Raises MemoryError.

    A rank takes it before others wait for its bytes: within an exchange it could neither do its part nor say so.
    """

    def __init__(self) -> None:
        self.leaving, self.coming = bytearray(_BLOCK), bytearray(_BLOCK)  # pages that nobody writes take no memory


class Fault(NamedTuple):
    """A transfer that failed, and why: a :class:`CheckpointError` where what came is not what the manifest says."""

    transfer: Transfer
    error: Exception


def exchange(
    transfers: Sequence[Transfer],
    rank: int,
    transport: Transport,
    blocks: Blocks,
    folder: Path,
    manifest: Manifest,
    files: FileSystem,
    heartbeat: Callable[[], None] = no_heartbeat,
) -> list[Fault]:
    """Do this rank's part of ``transfers`` between the ranks' own ``folder``, and return what failed of it.

    Each rank has the same list, and does its sends and its receives each in that order, at the same time: of the first
    transfer that is not done both ranks are at it, so that none waits for ever. After a failure the bytes go on, in
    vain, for the same reason. A file gets its name when all of it has come and has the hash that ``manifest`` says.
    """
    with ThreadPoolExecutor(1) as sender:
        leaving = [each for each in transfers if each.source == rank]
        sending = sender.submit(_send_all, leaving, transport, blocks.leaving, folder)
        receive = partial(_receive, transport, blocks.coming, folder, manifest, files, heartbeat)
        faults = [fault for each in transfers if each.target == rank and (fault := receive(each))]
        return [*faults, *sending.result()]


def _send_all(transfers: Iterable[Transfer], transport: Transport, memory: bytearray, folder: Path) -> list[Fault]:
    return [fault for each in transfers if (fault := _send(each, transport, memory, folder))]


def _blocks(size: int) -> Iterable[int]:
    """The lengths of the blocks of ``size`` bytes."""
    return (min(_BLOCK, size - start) for start in range(0, size, _BLOCK))


def _send(transfer: Transfer, transport: Transport, memory: bytearray, folder: Path) -> Fault | None:
    block, sent, fault = torch.frombuffer(memory, dtype=torch.uint8), 0, None
    try:
        with reading(folder / transfer.file) as file:
            for length in _blocks(transfer.size):
                file.readinto(memoryview(memory)[:length])  # of a file that was cut, less: the hash will tell
                transport.send(block[:length], transfer.target)
                sent += length
    except CheckpointError as error:
        fault = Fault(transfer, error)
    for length in _blocks(transfer.size - sent):  # the other end waits for them, and sees that they are none
        transport.send(block[:length], transfer.target)
    return fault


def _receive(
    transport: Transport,
    memory: bytearray,
    folder: Path,
    manifest: Manifest,
    files: FileSystem,
    heartbeat: Callable[[], None],
    transfer: Transfer,
) -> Fault | None:
    block, total, left = torch.frombuffer(memory, dtype=torch.uint8), xxhash.xxh3_128(), transfer.size
    path = folder / f"{_ARRIVING}{transfer.file}"
    try:
        with suppress(FileNotFoundError):
            files.unlink(path)
        with files.create(path) as file:
            for length in _blocks(transfer.size):
                transport.receive(block[:length], transfer.source)
                left -= length
                total.update(memoryview(memory)[:length])
                file.write(memoryview(memory)[:length])
                heartbeat()
        if total.hexdigest() != manifest.files[transfer.file].xxh3:
            files.unlink(path)
            why = "its XXH3 is not that of the manifest"
            return Fault(transfer, CheckpointError(f"{transfer.file} of rank {transfer.source} is damaged", why=why))
        files.replace(path, folder / transfer.file)
    except OSError as error:
        for length in _blocks(left):
            transport.receive(block[:length], transfer.source)
        with suppress(OSError):
            files.unlink(path)
        return Fault(transfer, error)
    return None
