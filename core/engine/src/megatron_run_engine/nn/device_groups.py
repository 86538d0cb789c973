"""Rows in groups whose sizes lie on the device of the rows: the host neither waits for them nor reads them.

So shapes follow from the number of rows alone, and a graph can hold the products. They are two operations of their own,
which captures record and compilers keep as they are: on a CPU, whose memory is the host's, each is a loop over groups;
on CUDA one kernel for all groups, torch's and, to add weight gradients to a wider total, that of
``fused.group_kernels``.

Legend: g groups, n rows of all groups together, a and c features.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.library import Library

from megatron_run_engine.nn.fused import triton_runs
from megatron_run_engine.nn.row_groups import RowGroups, UnevenGroups

if TYPE_CHECKING:
    from collections.abc import Sequence

#: torch's grouped product reads counts on the device on these generations of NVIDIA's, and on the host elsewhere.
_GENERATIONS = (9, 10)
#: It takes rows of multiples of this, in bytes.
_ALIGNMENT = 16

_library = Library("megatron_run_engine", "FRAGMENT")
_library.define("grouped_product(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")
_library.define("add_grouped_products(Tensor(a!) totals, Tensor left, Tensor right, Tensor ends) -> ()")


class DeviceGroups(UnevenGroups):
    """``rows`` rows, ``counts`` [g] of which belong to each group, integers on their device."""

    def __init__(self, counts: Tensor, rows: int) -> None:
        super().__init__(len(counts))
        self._rows, self._ends = rows, counts.cumsum(0, dtype=torch.int32)

    def multiply(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Each group's rows times its matrix: rows [n, a], ``matrices`` [g, a, c] -> [n, c]."""
        product: Tensor = torch.ops.megatron_run_engine.grouped_product(rows, matrices, self._ends)
        return product

    def add_products(self, totals: Tensor, left: Tensor, right: Tensor) -> None:
        """``totals[g] += left[g].T @ right[g]`` over the rows of each group: [g, a, c] of left [n, a], right [n, c]."""
        torch.ops.megatron_run_engine.add_grouped_products(totals, left, right, self._ends)

    @property
    def of_rows(self) -> Tensor:
        """The group of each row, int32 [n] on the device: that of the first end beyond it."""
        rows = torch.arange(self._rows, dtype=torch.int32, device=self._ends.device)
        return torch.searchsorted(self._ends, rows, right=True, out_int32=True)


def takes_counts(device: torch.device, dtype: torch.dtype, features: Sequence[int]) -> bool:
    """Whether products of ``dtype`` matrices with these numbers of ``features`` take counts that stay on ``device``.

    While a run on CUDA is planned, a GPU of the generations that can is taken for granted.
    """
    if device.type != "cuda":
        return device.type == "cpu"
    aligned = all(each * dtype.itemsize % _ALIGNMENT == 0 for each in features)
    return aligned and dtype == torch.bfloat16 and _reads_on_device(device.index or 0)


def _reads_on_device(index: int) -> bool:
    """Asked anew each time: the process that plans a run may train it afterwards, and then knows its GPU."""
    if not triton_runs():
        return False
    return not torch.cuda.is_initialized() or _generation(index) in _GENERATIONS


@cache
def _generation(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


def _on_host(ends: Tensor, rows: Tensor) -> RowGroups:
    return RowGroups(ends.tolist(), rows.device)


def _multiply_on_cpu(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return _on_host(ends, rows).multiply(rows, matrices)


def _add_on_cpu(totals: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    _on_host(ends, left).add_products(totals, left, right)


def _multiply_on_cuda(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    if not len(rows):
        return rows.new_empty(0, matrices.shape[2])
    # Autograd may hand over a gradient that is one value in all places, with strides of 0.
    product: Tensor = torch._grouped_mm(rows.contiguous(), matrices, offs=ends)
    return product


def _add_on_cuda(totals: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    from megatron_run_engine.nn.fused.group_kernels import add_grouped_products  # Triton takes a second to import

    add_grouped_products(totals, left.contiguous(), right.contiguous(), ends)


def _like_product(rows: Tensor, matrices: Tensor, _ends: Tensor) -> Tensor:
    return rows.new_empty(len(rows), matrices.shape[2])


_library.impl("grouped_product", _multiply_on_cpu, "CPU")
_library.impl("grouped_product", _multiply_on_cuda, "CUDA")
_library.impl("grouped_product", _like_product, "Meta")
_library.impl("add_grouped_products", _add_on_cpu, "CPU")
_library.impl("add_grouped_products", _add_on_cuda, "CUDA")
_library.impl("add_grouped_products", lambda *_: None, "Meta")
