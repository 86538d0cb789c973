"""How one layer is split: over which ranks, with sequence parallelism or not, and which rank holds which piece."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from megatron_run.contracts import Part
from megatron_run.errors import InputError, nearest_divisors, nearest_multiples
from megatron_run_engine.runtime.comm import ParallelGroup

if TYPE_CHECKING:
    from megatron_run.contracts import LinearPart, ParameterSpec
    from megatron_run.contracts.topology import Axis


@dataclass(frozen=True)
class Split:
    """``peers`` share the layer. With ``sequence`` each holds a part of the sequence between layers, instead of all.

    With ``overlap`` the collectives of a backward overlap weight gradients. ``axis`` is the axis of the peers.
    """

    peers: ParallelGroup
    sequence: bool = False
    overlap: bool = True
    axis: Axis = "tensor"

    def part(self, size: int, what: str) -> int:
        """Return an equal part of ``size``. Raises :class:`InputError` with the arithmetic if it does not divide."""
        ranks = self.peers.size
        if size % ranks:
            raise InputError(
                f"{size} {what} do not split over {ranks} {self.axis}-parallel ranks: "
                f"{size} / {ranks} = {size / ranks:g}",
                fix=f"set parallel.{self.axis} to {nearest_divisors(size, ranks)}, "
                f"or choose {nearest_multiples(size, ranks)} {what}",
            )
        return size // ranks

    def features(self, parts: tuple[LinearPart, ...]) -> int:
        """Return this rank's output features over all ``parts``. Raises as :meth:`part`."""
        return sum(self._rows(parts))

    def rows_of(self, name: str, parts: tuple[LinearPart, ...], columns: tuple[int, ...] = ()) -> tuple[Part, ...]:
        """Return where this rank's rows of the logical tensors ``<part>.<name>`` lie in a stacked parameter."""
        rows = self._rows(parts)
        return tuple(
            Part(
                f"{part.name}.{name}",
                (part.features, *columns),
                range(stop - mine, stop),
                start=self.peers.index * mine,
            )
            for part, mine, stop in zip(parts, rows, accumulate(rows), strict=True)
        )

    def columns_of(self, name: str, inputs: int, outputs: int) -> tuple[Part, ...]:
        """Return where this rank's columns of the logical matrix ``name`` [outputs, inputs] lie."""
        column = self.peers.index * self.part(inputs, "input features")
        return (Part(name, (outputs, inputs), range(outputs), column=column),)

    def whole(self, spec: ParameterSpec) -> ParameterSpec:
        """Return ``spec`` for a parameter that is replicated over the ranks, between split layers.

        With sequence parallelism each rank sees s/t tokens, so its gradient is a partial sum.
        """
        return replace(spec, partial_over=self.axis) if self.sequence else spec

    def _rows(self, parts: tuple[LinearPart, ...]) -> list[int]:
        return [self.part(part.features, str(part)) for part in parts]
