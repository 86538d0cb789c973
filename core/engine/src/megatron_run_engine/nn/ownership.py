"""Which of the vocabulary's ids are whose, where ranks share it."""

from __future__ import annotations

from torch import Tensor


def owned(ids: Tensor, first: int, rows: int, stop: int) -> tuple[Tensor, Tensor]:
    """Where ``ids`` [*] lie among this rank's ``rows`` ids from ``first`` on, and whether they do: both [*].

    An id of another rank lies at some row of this one. Which one differs from id to id, so that what is added there on
    its behalf does not all meet in one place. One outside [0, ``stop``) belongs to nobody and raises RuntimeError: at
    once on the CPU, and on CUDA, without waiting for the device, as the failed assertion of a kernel.
    """
    ids.new_zeros(1).expand(stop).gather(0, ids.flatten())  # an index that is checked on the device, and no memory
    row = ids - first
    return row.remainder(max(rows, 1)), (row >= 0) & (row < rows)
