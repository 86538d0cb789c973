"""Random numbers as a pure function of the place where they are used.

Neither dropout nor fused attention takes a generator, so before each segment the device's default generator is seeded
from (seed, step, sample, layer, segment, shard). Masks therefore do not depend on pipeline or data parallelism, and a
resumed run needs no generator state.

There are two streams, as in Shoeybi et al. 2019 (Megatron-LM), appendix B.2. Tensors that every tensor-parallel rank
computes whole need the same mask on all of them; tensors that are split need different masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_run.contracts import Microbatch

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Hash ``numbers`` to 63 bits by folding each through SplitMix64's finaliser (Steele, Lea and Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class RandomStreams:
    """Positions the random streams of one rank; ``shard`` is its tensor-parallel rank, ``piece`` its context-parallel.

    The sharded stream is the device's default generator; ``replicated`` is equal on every shard. Both differ between
    pieces, which hold other tokens of the same samples.
    """

    def __init__(self, seed: int, device: torch.device, shard: int = 0, piece: int = 0) -> None:
        self._seed, self._shard, self._piece = seed, shard, piece
        self.sharded = _default_generator(device)
        self.replicated = torch.Generator(device if device.type == "cuda" else "cpu")
        self._positions = True

    @property
    def streams(self) -> tuple[torch.Generator, torch.Generator]:
        """Both generators, the sharded one first."""
        return self.sharded, self.replicated

    def position(self, microbatch: Microbatch, layer: int, segment: int) -> None:
        """Seed both streams for segment ``segment`` of layer ``layer``."""
        if not self._positions:
            return
        place = mix(self._seed, microbatch.step, microbatch.sample0, layer, segment)
        if self._piece:
            place = mix(place, -1, self._piece)  # no shard has this place
        self.sharded.manual_seed(mix(place, self._shard))
        self.replicated.manual_seed(place)

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Within: nothing is positioned, for a recording of what draws nothing."""
        self._positions = False
        try:
            yield
        finally:
            self._positions = True


def initial_generator(seed: int, name: str) -> torch.Generator:
    """The generator that fills the logical tensor ``name``: equal for every parallel layout."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()  # default_generators is empty before
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
