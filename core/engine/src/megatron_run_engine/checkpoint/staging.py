"""One copy of a rank's state on the host, made again and again in the same memory, so that training may go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from megatron_run_engine.checkpoint.shard_file import by_name, place

if TYPE_CHECKING:
    from megatron_run.contracts.state import StatePiece


class Staging:
    """Memory for one copy, which grows to what the first copies need and is then kept; ``device`` is where state lives.

    Boxes lie in it in the order of their file, one after the other. State of a CUDA device is copied into pinned memory
    while the host goes on; the copy is made in the order of the device's work, so nothing that is started later can
    change it.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def bytes(self) -> int:
        """How much memory it holds."""
        return self._memory.nbytes

    @torch.no_grad()
    def copy(self, pieces: Iterable[StatePiece]) -> Iterator[StatePiece]:
        """Copy ``pieces``; the same boxes with the values that they have now.

        What is returned waits for the device when it is first asked for a box, whichever thread asks. It is good until
        the next copy is made.
        """
        named = by_name(pieces)
        entries = place({name: piece.tensor for name, piece in named.items()})
        self._reserve(max((entry.stop for entry in entries.values()), default=0))
        copies = []
        for name, piece in named.items():
            raw = self._memory[entries[name].start : entries[name].stop]
            copy = raw.view(piece.tensor.dtype).view(piece.tensor.shape)
            copy.copy_(piece.tensor, non_blocking=True)
            copies.append(piece._replace(tensor=copy))
        return self._arriving(copies, torch.cuda.current_stream(self._device).record_event() if self._cuda else None)

    def _reserve(self, size: int) -> None:
        if size > self.bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old memory goes before the new one comes
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)

    @staticmethod
    def _arriving(copies: list[StatePiece], arrived: torch.cuda.Event | None) -> Iterator[StatePiece]:
        if arrived is not None:
            arrived.synchronize()
        yield from copies
