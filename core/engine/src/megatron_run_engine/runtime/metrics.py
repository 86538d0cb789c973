"""Metrics of a step: summed on the device, reduced over the ranks by one all-reduce, copied to the host once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_run.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from megatron_run_engine.runtime.comm import Groups


class Meter:
    """A weighted mean over microbatches and ranks. ``add`` costs no host synchronisation."""

    def __init__(self, cell: Tensor) -> None:
        self._cell = cell  # [2]: sum of value * weight, sum of weights; float64, a view of the metrics' buffer

    def add(self, total: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add a ``total`` over ``weight`` units; both are scalars. No gradient flows through a metric."""
        with torch.no_grad():  # or the cell would keep the history of every step
            self._cell[0] += total  # stays on the device: no synchronisation
            self._cell[1] += weight


class LargestMeter(Meter):
    """The largest value over microbatches and ranks."""

    def __init__(self, cell: Tensor, peak: Tensor) -> None:
        super().__init__(cell)
        self._peak = peak  # []: float64

    def add(self, total: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add a value, ``total``. What is not a number counts as infinite."""
        with torch.no_grad():
            self._peak.copy_(torch.maximum(self._peak, torch.as_tensor(total, device=self._peak.device)))
            self._cell[1] += weight


class Metrics:
    """Creates meters while plugins are built, and reduces them all at once.

    The set of names is fixed before the first step and equal on every rank, so one all-reduce of fixed size suffices,
    and one more where there are largest values. A rank without values for a name contributes zeros.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cells: dict[str, Tensor] = {}
        self._totals: set[str] = set()
        self._peaks: dict[str, Tensor] = {}
        self._read: list[tuple[list[Meter], Callable[[], Sequence[float]]]] = []

    def scalar(self, name: str) -> Meter:
        """Create the meter of ``name``, under which observers see it. Each name may be used once."""
        if name in self._cells:
            raise PluginError(f"the metric {name!r} is reported twice", fix="give it another name")
        self._cells[name] = torch.zeros(2, dtype=torch.float64, device=self._device)
        return Meter(self._cells[name])

    def total(self, name: str) -> Meter:
        """Create a meter of ``name`` that is reported as the sum over microbatches and ranks; weights do not count.

        Every rank that adds counts: what tensor-parallel ranks compute alike should be added by one of them.
        """
        self._totals.add(name)
        return self.scalar(name)

    def largest(self, name: str) -> Meter:
        """Create a meter of ``name`` that is reported as the largest value over microbatches and ranks."""
        self.total(name)
        self._peaks[name] = torch.full((), -torch.inf, dtype=torch.float64, device=self._device)
        return LargestMeter(self._cells[name], self._peaks[name])

    def read(self, names: Sequence[str], take: Callable[[], Sequence[float]]) -> None:
        """Report what ``take`` returns under ``names`` with each step: numbers of each rank's host, by their mean."""
        self._read.append(([self.scalar(name) for name in names], take))

    def collect(self, groups: Groups) -> Tensor:
        """Reduce over the world and reset: [names, 2] of (sum or largest, weight), float64 on the device."""
        if not self._cells:
            return torch.zeros(0, 2, dtype=torch.float64, device=self._device)
        for meters, take in self._read:
            for meter, value in zip(meters, take(), strict=True):
                meter.add(value)
        sums = groups.sum_(torch.stack(list(self._cells.values())), "world")
        if self._peaks:
            rows = [row for row, name in enumerate(self._cells) if name in self._peaks]
            peaks = torch.stack(list(self._peaks.values()))
            peaks.masked_fill_(peaks.isnan(), torch.inf)  # the maximum of a backend may drop it
            sums[rows, 0] = groups.max_(peaks, "world")
        for cell in self._cells.values():
            cell.zero_()
        for peak in self._peaks.values():
            peak.fill_(-torch.inf)
        return sums

    @property
    def names(self) -> list[str]:
        """All names, in the order of the rows of :meth:`collect`."""
        return list(self._cells)

    def means(self, sums: list[list[float]]) -> dict[str, float]:
        """Means, sums of totals and largest values, by name, from the result of :meth:`collect` on the host.

        Names without a report are omitted.
        """
        return {
            name: total if name in self._totals else total / weight
            for name, (total, weight) in zip(self._cells, sums, strict=True)
            if weight
        }
