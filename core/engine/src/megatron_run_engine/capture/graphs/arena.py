"""The memory pool of tapes: a block is reused as soon as its storage is freed.

It mimics the CUDA caching allocator's private pool of a graph. Only the storage cut from a block keeps the block, so a
replay in another order than the recorded one corrupts memory here exactly as it would on a GPU.
"""

from __future__ import annotations

import weakref
from bisect import insort
from typing import NamedTuple

import torch
from torch import Tensor

#: Alignment of blocks in bytes, the same as in PyTorch's own CPU allocator.
ALIGNMENT = 64
#: Bytes requested from the system at a time.
SEGMENT = 2**20


class _Block(NamedTuple):
    """Bytes ``start`` to ``start + size - 1`` of a segment."""

    segment: int
    start: int
    size: int


class Arena:
    """Memory for the tensors of tapes; ``held`` is the number of bytes in use, ``peak`` its maximum."""

    def __init__(self) -> None:
        self._segments: list[Tensor] = []
        self._free: list[_Block] = []
        # Weak references: the arena must notice that a storage is gone without keeping it alive. torch keeps the Python
        # object of a storage as long as the storage.
        self._used: dict[_Block, weakref.ref[torch.UntypedStorage]] = {}
        self._gone: list[_Block] = []
        self.held = self.peak = 0

    def like(self, tensor: Tensor) -> Tensor:
        """An uninitialised tensor with the type, shape and strides of ``tensor``."""
        span = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
        storage = self._allocate(max(1, span if tensor.numel() else 0) * tensor.element_size())
        with torch.no_grad():
            return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.size(), tensor.stride())

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in this memory."""
        place = tensor.data_ptr()
        return any(segment.data_ptr() <= place < segment.data_ptr() + segment.numel() for segment in self._segments)

    def collect(self) -> None:
        """Free the blocks of storages that are gone."""
        while self._gone:
            block = self._gone.pop()
            del self._used[block]
            self.held -= block.size
            self._give_back(block)

    def _allocate(self, size: int) -> torch.UntypedStorage:
        self.collect()
        rounded = -(-size // ALIGNMENT) * ALIGNMENT
        fitting = [block for block in self._free if block.size >= rounded] or [self._grow(rounded)]
        block = min(fitting, key=lambda block: block.size)  # best fit limits fragmentation
        self._free.remove(block)
        if block.size > rounded:
            insort(self._free, _Block(block.segment, block.start + rounded, block.size - rounded))
        taken = _Block(block.segment, block.start, rounded)
        storage: torch.UntypedStorage = self._segments[taken.segment].untyped_storage()[
            taken.start : taken.start + size
        ]
        gone = self._gone.append
        self._used[taken] = weakref.ref(storage, lambda _: gone(taken))
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
        """Free ``block``, merged with the free blocks that touch it."""
        segment, start, stop = block.segment, block.start, block.start + block.size
        for other in [free for free in self._free if free.segment == segment]:
            if other.start + other.size == start or other.start == stop:
                self._free.remove(other)
                start, stop = min(start, other.start), max(stop, other.start + other.size)
        insort(self._free, _Block(segment, start, stop - start))
