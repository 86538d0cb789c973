"""Stand-ins for peers and data where a step is counted on fake tensors, which have shapes and no values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_run_engine.runtime.comm import Groups, ParallelGroup, Pending

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import Boundary, Field
    from megatron_run.contracts.topology import Axis, Topology


class PlannedGroup(ParallelGroup):
    """Peers that exist on paper: results have their shapes, and nothing travels."""

    def start_gather(self, part: Tensor) -> Pending:
        """As many rows as all peers have."""
        return Pending(part.new_empty((self.size * part.shape[0], *part.shape[1:])))

    def start_scatter_sum(self, whole: Tensor) -> Pending:
        """One peer's rows."""
        return Pending(whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:])))

    def start_pass_on(self, part: Tensor) -> Pending:
        """A message of this size."""
        return Pending(torch.empty_like(part))

    @property
    def _several(self) -> bool:
        return False  # the other collectives keep the shape of what they are given


@dataclass(frozen=True)
class PlannedGroups(Groups):
    """No process group, and :class:`PlannedGroup` along every axis."""

    def parallel_group(self, topology: Topology, axis: Axis) -> ParallelGroup:
        """The peers along ``axis``."""
        members = topology.peers(axis)
        return PlannedGroup(members.index(topology.rank), len(members), None, axis, self.activity)


def microbatch_field(field: Field, size: int, length: int) -> Tensor:
    """A microbatch of ``field``, of which sizes that the data chooses count as 1."""
    sizes = [length if each == "s" else each or 1 for each in field.shape]
    return torch.zeros((size, *sizes), dtype=getattr(torch, field.dtype))


def received_tensors(boundary: Boundary) -> tuple[Tensor, dict[str, Tensor]]:
    """The input of a chunk from the one before it, of which sizes that only the sender knows count as 1."""
    x, *beside = (
        torch.zeros([size or 1 for size in each.shape], dtype=each.dtype, requires_grad=True)
        for each in boundary.tensors
    )
    return x, dict(zip(boundary.beside, beside, strict=True))
