"""How one layer is split: among which ranks, along the sequence or not, and the arithmetic of equal parts."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_run.comm import Peers
from megatron_run.errors import InputError, nearest_divisors, nearest_multiples


@dataclass(frozen=True)
class Split:
    """``peers`` share the layer. ``sequence``: between layers each holds its part of the sequence, not all of it.

    ``overlap``: the collectives of a backward run while weight gradients are computed.
    """

    peers: Peers
    sequence: bool = False
    overlap: bool = True

    def part(self, size: int, what: str) -> int:
        """An equal part of ``size``. Raises :class:`InputError` with the arithmetic when it does not divide."""
        ranks = self.peers.size
        if size % ranks:
            raise InputError(
                f"{size} {what} do not split over {ranks} tensor-parallel ranks: {size} / {ranks} = {size / ranks:g}",
                fix=f"set parallel.tensor to {nearest_divisors(size, ranks)}, "
                f"or choose {nearest_multiples(size, ranks)} {what}",
            )
        return size // ranks
