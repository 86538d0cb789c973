"""The memory of tapes: blocks that are given to others as soon as the tensors in them are gone.

It does what the CUDA caching allocator does with a graph's private pool. A block belongs to the storage that was cut
from it and nobody else keeps it, so that another order than the recorded one goes wrong here as it does there.
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

#: Bytes to which blocks are aligned, as PyTorch's own CPU allocator aligns.
ALIGNMENT = 64
#: Bytes that are asked of the system at a time.
SEGMENT = 2**20


class _Block(NamedTuple):
    """Bytes ``start`` to ``start + size - 1`` of a segment."""

    segment: int
    start: int
    size: int


class Arena:
    """Memory for the tensors of tapes; ``peak`` and ``held`` are the bytes in use, at most and now."""

    def __init__(self) -> None:
        self._segments: list[Tensor] = []
        self._free: list[_Block] = []
        self._used: dict[_Block, StorageWeakRef] = {}
        self.held = self.peak = 0

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor without values of the same type, shape and strides."""
        span = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
        storage = self._allocate(max(1, span if tensor.numel() else 0) * tensor.element_size())
        with torch.no_grad():
            return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.size(), tensor.stride())

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in this memory."""
        place = tensor.data_ptr()
        return any(segment.data_ptr() <= place < segment.data_ptr() + segment.numel() for segment in self._segments)

    def collect(self) -> None:
        """Take back the blocks of storages that are gone."""
        for block in [block for block, owner in self._used.items() if owner.expired()]:
            del self._used[block]
            self.held -= block.size
            self._give_back(block)

    def _allocate(self, size: int) -> torch.UntypedStorage:
        self.collect()
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        fitting = [block for block in self._free if block.size >= rounded] or [self._grow(rounded)]
        block = min(fitting, key=lambda block: block.size)
        self._free.remove(block)
        if block.size > rounded:
            insort(self._free, _Block(block.segment, block.start + rounded, block.size - rounded))
        taken = _Block(block.segment, block.start, rounded)
        storage: torch.UntypedStorage = self._segments[taken.segment].untyped_storage()[
            taken.start : taken.start + size
        ]
        self._used[taken] = StorageWeakRef(storage)
        self.held += rounded
        self.peak = max(self.peak, self.held)
        return storage

    def _grow(self, size: int) -> _Block:
        segment = torch.empty(max(SEGMENT, size) + ALIGNMENT, dtype=torch.uint8)
        self._segments.append(segment)
        start = -segment.data_ptr() % ALIGNMENT
        block = _Block(len(self._segments) - 1, start, segment.numel() - ALIGNMENT)
        insort(self._free, block)
        return block

    def _give_back(self, block: _Block) -> None:
        """Join ``block`` with the free ones that touch it."""
        segment, start, stop = block.segment, block.start, block.start + block.size
        for other in [free for free in self._free if free.segment == segment]:
            if other.start + other.size == start or other.start == stop:
                self._free.remove(other)
                start, stop = min(start, other.start), max(stop, other.start + other.size)
        insort(self._free, _Block(segment, start, stop - start))
