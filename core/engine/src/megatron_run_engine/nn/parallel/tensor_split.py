"""How one layer is split: among which ranks, along the sequence or not, and which piece of each matrix is whose."""

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
    """``peers`` share the layer. ``sequence``: between layers each holds its part of the sequence, not all of it.

    ``overlap``: the collectives of a backward run while weight gradients are computed. ``axis`` is that of the peers.
    """

    peers: ParallelGroup
    sequence: bool = False
    overlap: bool = True
    axis: Axis = "tensor"

    def part(self, size: int, what: str) -> int:
        """An equal part of ``size``. Raises :class:`InputError` with the arithmetic when it does not divide."""
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
        """Output features of this rank over all ``parts``. Raises as :meth:`part`."""
        return sum(self._rows(parts))

    def rows_of(self, name: str, parts: tuple[LinearPart, ...], columns: tuple[int, ...] = ()) -> tuple[Part, ...]:
        """Where this rank's rows of the logical tensors ``<part>.<name>`` lie, in a parameter that stacks them."""
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
        """Where this rank's columns of the logical matrix ``name`` [outputs, inputs] lie."""
        column = self.peers.index * self.part(inputs, "input features")
        return (Part(name, (outputs, inputs), range(outputs), column=column),)

    def whole(self, spec: ParameterSpec) -> ParameterSpec:
        """``spec`` of a parameter that every rank holds whole, between layers.

        Under sequence parallelism each rank sees s/t tokens, so its gradient is one part of a sum.
        """
        return replace(spec, partial_over=self.axis) if self.sequence else spec

    def _rows(self, parts: tuple[LinearPart, ...]) -> list[int]:
        return [self.part(part.features, str(part)) for part in parts]
