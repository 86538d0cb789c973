"""How one layer is split: over which ranks, along the sequence or not, and which piece of each matrix a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from megatron_run.contracts import Part
from megatron_run.contracts.parallel_layer import even_part
from megatron_run_engine.runtime.comm import ParallelGroup

if TYPE_CHECKING:
    from megatron_run.contracts import LinearPart, ParameterSpec
    from megatron_run.contracts.topology import Axis


@dataclass(frozen=True)
class Split:
    """A split of a layer over ``peers``, the ranks along ``axis``.

    ``sequence``: between layers each rank holds its part of the sequence instead of all of it (sequence parallelism).
    ``overlap``: collectives of the backward run while gradients are computed.
    """

    peers: ParallelGroup
    sequence: bool = False
    overlap: bool = True
    axis: Axis = "tensor"

    def part(self, size: int, what: str) -> int:
        """``size`` over the number of ranks. Raises as :func:`even_part`."""
        return even_part(size, self.peers.size, what, self.axis)

    def features(self, parts: tuple[LinearPart, ...]) -> int:
        """This rank's output features, summed over ``parts``. Raises as :meth:`part`."""
        return sum(self._rows(parts))

    def rows_of(self, name: str, parts: tuple[LinearPart, ...], columns: tuple[int, ...] = ()) -> tuple[Part, ...]:
        """Parts of a parameter that stacks this rank's rows of the logical tensors ``<part>.<name>``."""
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
        """The part of a parameter that holds this rank's columns of the logical matrix ``name`` [outputs, inputs]."""
        column = self.peers.index * self.part(inputs, "input features")
        return (Part(name, (outputs, inputs), range(outputs), column=column),)

    def whole(self, spec: ParameterSpec) -> ParameterSpec:
        """``spec`` of a replicated parameter that acts outside the region, such as a norm's.

        Under sequence parallelism each rank sees s/t tokens there, so its gradient is one term of a sum over the axis.
        """
        return replace(spec, partial_over=self.axis) if self.sequence else spec

    def _rows(self, parts: tuple[LinearPart, ...]) -> list[int]:
        return [self.part(part.features, str(part)) for part in parts]
