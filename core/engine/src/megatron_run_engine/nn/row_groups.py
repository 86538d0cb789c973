"""Rows in groups whose sizes the host knows: alike (:class:`EqualGroups`) or each its own (:class:`RowGroups`).

Legend: g groups, n rows of all groups together, i inputs, o outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_run_engine.nn.device import device_type, is_fake, on_cpu, stands_for_gpu
from megatron_run_engine.nn.linear import add_product, can_widen, widening_pays

if TYPE_CHECKING:
    from collections.abc import Sequence


class EqualGroups:
    """``rows`` rows in groups of ``size``: nothing is read from a tensor, so that a graph can hold their products."""

    def __init__(self, size: int, rows: int) -> None:
        self._size, self._groups = size, rows // size

    def stacked(self, parameter: Tensor) -> Tensor:
        """[g*o, *] -> [g, o, *]."""
        return parameter.view(self._groups, -1, *parameter.shape[1:])

    def multiply(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Each group's rows times its matrix: rows [n, a], ``matrices`` [g, a, c] -> [n, c]."""
        cut = self._cut(rows)
        if not widening_pays(cut[0]):
            return torch.bmm(cut, matrices).flatten(0, 1)
        product = rows.new_empty(*cut.shape[:2], matrices.shape[2])
        for out, one, matrix in zip(product, cut, matrices, strict=True):
            _multiply_into(out, one, matrix)
        return product.flatten(0, 1)

    def add_products(self, totals: Tensor, left: Tensor, right: Tensor) -> None:
        """``totals[g] += left[g].T @ right[g]``: [g, a, c] of left [n, a] and right [n, c]."""
        across, right = self._cut(left).transpose(1, 2), self._cut(right)
        if totals.dtype == left.dtype:
            totals.baddbmm_(across, right)
        elif not is_fake(left) and _widens_batches(device_type(left), left.dtype, totals.dtype):
            torch.ops.aten.baddbmm.dtype_out(totals, across, right, totals.dtype, out=totals)
        elif on_cpu(left) or stands_for_gpu(left):
            # A CPU's batched products take as long as one by one; of a GPU's into other types torch has no fake ones.
            for total, one, other in zip(totals, across, right, strict=True):
                add_product(total, one, other)
        else:
            totals.add_(torch.bmm(across, right))

    def add_biases(self, rows: Tensor, biases: Tensor, share: float) -> None:
        """Add ``share`` of its group's bias [g, o] to each of ``rows`` [n, o]."""
        self._cut(rows).add_(biases[:, None], alpha=share)

    def add_sums(self, totals: Tensor, rows: Tensor, share: float) -> None:
        """Add ``share`` of the sum of each group's ``rows`` [n, o] to ``totals`` [g, o]."""
        totals.add_(self._cut(rows).sum(1), alpha=share)

    def _cut(self, rows: Tensor) -> Tensor:
        """[n, *] -> [g, n/g, *]."""
        return rows.view(self._groups, self._size, *rows.shape[1:])


class UnevenGroups(ABC):
    """Rows sorted by group, as many in each of ``groups`` as there are."""

    def __init__(self, groups: int) -> None:
        self._groups = groups

    @property
    @abstractmethod
    def of_rows(self) -> Tensor:
        """The group of each row, int32 [n] on the device of the rows."""

    def stacked(self, parameter: Tensor) -> Tensor:
        """[g*o, *] -> [g, o, *]."""
        return parameter.view(self._groups, -1, *parameter.shape[1:])

    def add_biases(self, rows: Tensor, biases: Tensor, share: float) -> None:
        """Add ``share`` of its group's bias [g, o] to each of ``rows`` [n, o]."""
        rows.add_(biases.index_select(0, self.of_rows), alpha=share)

    def add_sums(self, totals: Tensor, rows: Tensor, share: float) -> None:
        """Add ``share`` of the sum of each group's ``rows`` [n, o] to ``totals`` [g, o].

        One product with a matrix of zeros and ones, in the type of the totals: two kernels a group would take longer
        than the group's own product.
        """
        groups = torch.arange(self._groups, device=rows.device)
        member = (groups[:, None] == self.of_rows).to(totals.dtype)  # [g, n]
        totals.addmm_(member, rows.to(totals.dtype), alpha=share)


class RowGroups(UnevenGroups):
    """Rows on ``device`` whose groups end at ``ends`` [g], numbers of the host.

    ``places`` lists the non-empty groups with the slice of their rows.
    """

    def __init__(self, ends: Sequence[int], device: torch.device) -> None:
        super().__init__(len(ends))
        self._device, self._ends = device, ends
        bounds = enumerate(pairwise((0, *ends)))
        self.places = [(group, slice(start, end)) for group, (start, end) in bounds if end > start]

    def multiply(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Each group's rows times its matrix: rows [n, a], ``matrices`` [g, a, c] -> [n, c]."""
        by_group = _has_onednn(device_type(rows), rows.dtype) or widening_pays(rows)
        if not by_group and _takes_grouped(rows, matrices):
            grouped: Tensor = torch._grouped_mm(rows, matrices, offs=self._all_ends)
            return grouped
        product = rows.new_empty(len(rows), matrices.shape[2])
        for group, where in self.places:
            _multiply_into(product[where], rows[where], matrices[group])
        return product

    def add_products(self, totals: Tensor, left: Tensor, right: Tensor) -> None:
        """``totals[g] += left[g].T @ right[g]`` over the rows of each group: [g, a, c] of left [n, a], right [n, c].

        A product a group is added in its kernel, which one call for all cannot do: it would round 16-bit products
        before they are added to wider totals. So it serves types that are equal, and devices that cannot widen either.
        """
        by_group = on_cpu(left) or (totals.dtype != left.dtype and can_widen(left, totals.dtype))
        if not by_group and _takes_grouped(left, right):
            self.add_grouped(totals, left, right)
            return
        for group, where in self.places:
            add_product(totals[group], left[where].t(), right[where])

    def add_grouped(self, totals: Tensor, left: Tensor, right: Tensor) -> None:
        """:meth:`add_products` in one call, over non-empty groups only.

        For an empty group some devices return values other than zero.
        """
        ends = self._on_device(torch.tensor([where.stop for _, where in self.places]))
        products = torch._grouped_mm(left.t(), right, offs=ends)  # [groups with rows, a, c]
        if len(products) == len(totals):
            totals.add_(products)
            return
        for (group, _), product in zip(self.places, products, strict=True):
            totals[group].add_(product)

    @cached_property
    def of_rows(self) -> Tensor:
        """The group of each row, int32 [n] on the device."""
        counts = torch.tensor([end - start for start, end in pairwise((0, *self._ends))])
        return self._on_device(torch.arange(len(counts)).repeat_interleave(counts))

    @cached_property
    def _all_ends(self) -> Tensor:
        """End of each group, int32 [g] on the device: uploaded once for forward and backward."""
        return self._on_device(torch.tensor(self._ends))

    def _on_device(self, numbers: Tensor) -> Tensor:
        return numbers.to(torch.int32).to(self._device, non_blocking=True)


def _multiply_into(out: Tensor, rows: Tensor, matrix: Tensor) -> None:
    """``out[:] = rows @ matrix``: [n, c] of [n, a] and [a, c], rounded once where operands are widened."""
    if widening_pays(rows):
        rows, matrix = rows.float(), matrix.float()
    if _has_onednn(device_type(rows), rows.dtype):
        out.copy_(_onednn_product(rows, matrix))
    elif rows.dtype == out.dtype:
        torch.mm(rows, matrix, out=out)
    else:
        out.copy_(rows @ matrix)


def _onednn_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """[n, a] times [a, c] by oneDNN.

    In fp32 on a CPU, ``torch.mm`` calls MKL, and ``torch._grouped_mm`` does so once per group. MKL is slower for the
    few rows of one expert: slightly with one thread, more with two.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, matrix.t(), None, "none", [], "")
    return product


@cache
def _widens_batches(device: str, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether batched products of ``narrow`` operands can be added to a ``wide`` total there, found by trying."""
    ones = torch.ones((2, 16, 16), dtype=narrow, device=device)
    total = torch.ones((2, 16, 16), dtype=wide, device=device)
    try:
        torch.ops.aten.baddbmm.dtype_out(total, ones, ones, wide, out=total)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((total == 17).all())


@cache
def _has_onednn(device: str, dtype: torch.dtype) -> bool:
    """Whether :func:`_onednn_product` works there and is worth it: in 16 bits ``torch.mm`` calls oneDNN itself."""
    if device != "cpu" or dtype != torch.float32:
        return False
    try:
        _onednn_product(torch.zeros(2, 2), torch.zeros(2, 2))
    except (AttributeError, RuntimeError):
        return False
    return True


def _takes_grouped(left: Tensor, right: Tensor) -> bool:
    """Whether ``torch._grouped_mm`` takes these operands: not empty, a supported type, strides of 16-byte multiples."""
    strides = [stride * each.element_size() for each in (left, right) for stride in each.stride() if stride != 1]
    aligned = all(stride % 16 == 0 for stride in strides)
    return len(left) > 0 and aligned and (stands_for_gpu(left) or _has_grouped_mm(device_type(left), left.dtype))


@cache
def _has_grouped_mm(device: str, dtype: torch.dtype) -> bool:
    """Whether ``torch._grouped_mm`` works there, found by trying: supported devices and types differ by release."""
    try:
        rows, matrices = (torch.zeros(shape, dtype=dtype, device=device) for shape in ((16, 16), (2, 16, 16)))
        ends = torch.tensor([8, 16], dtype=torch.int32, device=device)
        torch._grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
        torch._grouped_mm(rows.t(), rows, offs=ends)
    except (AttributeError, RuntimeError):
        return False
    return True
