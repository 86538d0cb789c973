"""The gradients that this rank updates: whether they are finite, their norm, and what they are multiplied by.

A step divides them by the loss scale and clips them. On a GPU each multiplication would be a pass over memory, and so
would the search for non-finite values. :class:`LateFactors` reads the gradients once, for all of their norms, and
leaves the multiplication to the update, which reads them anyway.

Gradients whose update runs on the host are on their way there when their norm, and so the factor of clipping, becomes
known: the device's are measured, and their copies multiplied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from megatron_run_engine.optim.sharding import Shard


class Gradients(ABC):
    """The gradients of ``shards`` on ``device``, which :meth:`arrived` says are new."""

    #: What they are still to be multiplied by, fp32 [1]; None: by nothing.
    factor: Tensor | None = None

    def __init__(self, shards: Sequence[Shard], device: torch.device) -> None:
        self._device = device
        self._all = [shard.measured for shard in shards if shard.updated]
        self._counted = [grads for shard in shards for grads in shard.counted()]
        self._others = [grads for shard in shards for grads in shard.not_counted()]

    @abstractmethod
    def arrived(self) -> None:
        """Forget what is known of the gradients, which are those of another step."""

    @abstractmethod
    def unscale_(self, factor: Tensor) -> Tensor:
        """Multiply by ``factor`` (fp32 [1]); return 1 if a value was not finite, else 0, fp32 [1]."""

    @abstractmethod
    def sum_of_squares(self) -> Tensor:
        """The sum of the squares of the values that this rank adds to the global norm, float64 [1]."""

    @abstractmethod
    def multiply_(self, factor: Tensor) -> None:
        """Multiply by ``factor`` [1], float64."""

    @abstractmethod
    def settle(self) -> None:
        """Multiply by what is still to be multiplied by."""

    @property
    def factors(self) -> Sequence[Tensor]:
        """The factors by which an update of copies multiplies them, one after the other."""
        return () if self.factor is None else (self.factor,)

    def multiplied(self, shard: Shard) -> Tensor:
        """The gradients of ``shard`` times all factors, on the device."""
        self.settle()
        return shard.grads


class FactorsAtOnce(Gradients):
    """Multiplies when it is asked to: on a CPU, where the numbers of a run have always been rounded so."""

    def arrived(self) -> None:
        """Nothing is remembered."""

    def unscale_(self, factor: Tensor) -> Tensor:
        """Multiply and check in one pass."""
        found_inf = torch.zeros(1, device=self._device)
        if self._all:
            torch._amp_foreach_non_finite_check_and_unscale_(self._all, found_inf, factor)
        return found_inf

    def sum_of_squares(self) -> Tensor:
        """One tensor after the other."""
        squares = torch.zeros(1, dtype=torch.float64, device=self._device)
        for grads in self._counted:
            squares += sum_of_squares(grads)
        return squares

    def multiply_(self, factor: Tensor) -> None:
        """One pass."""
        for grads in self._all:
            grads.mul_(factor.to(grads.dtype))

    def settle(self) -> None:
        """Nothing is left."""


class LateFactors(Gradients):
    """Reads the gradients once, and collects the factors for the update.

    Norms are summed in float64, where no square of an fp32 value overflows: a norm is finite if, and only if, all
    values are.
    """

    def __init__(self, shards: Sequence[Shard], device: torch.device) -> None:
        super().__init__(shards, device)
        self._norms: Tensor | None = None

    def arrived(self) -> None:
        """Forget norms and factors."""
        self._norms = self.factor = None

    def unscale_(self, factor: Tensor) -> Tensor:
        """Look at the norms of all tensors, those that count for the global norm and the others."""
        self._collect(factor)
        return 1.0 - self._each().isfinite().all().float().reshape(1)

    def sum_of_squares(self) -> Tensor:
        """From the norms, and the factor so far."""
        squares = self._each()[: len(self._counted)].square().sum().reshape(1)
        return squares if self.factor is None else squares * self.factor.double().square()

    def multiply_(self, factor: Tensor) -> None:
        """Collect the factor."""
        self._collect(factor)

    def settle(self) -> None:
        """Multiply in a pass, for what cannot multiply as it reads."""
        if self.factor is not None and self._all:
            torch._foreach_mul_(self._all, self.factor.reshape(()))
        self.arrived()

    def _collect(self, factor: Tensor) -> None:
        factor = factor if self.factor is None else self.factor.double() * factor
        self.factor = factor.float()

    def _each(self) -> Tensor:
        """The norm of each tensor, not multiplied by the factor: the counted ones first, float64 [tensors]."""
        if self._norms is None:
            tensors = [*self._counted, *self._others]
            norms = torch._foreach_norm(tensors, 2, dtype=torch.float64) if tensors else ()
            self._norms = torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64, device=self._device)
        return self._norms


class FactorsOfCopies(Gradients):
    """Multiplies a copy for each look at the gradients: on a CPU, where it gives the bits of ``FactorsAtOnce``."""

    def __init__(self, shards: Sequence[Shard], device: torch.device) -> None:
        super().__init__(shards, device)
        self._factors: list[Tensor] = []
        self._main = shards[0].grads.dtype

    @property
    def factors(self) -> Sequence[Tensor]:
        """All of them."""
        return self._factors

    def arrived(self) -> None:
        """Forget the factors."""
        self._factors.clear()

    def unscale_(self, factor: Tensor) -> Tensor:
        """Check without multiplying."""
        finite = all(bool(grads.isfinite().all()) for grads in self._all)
        self._factors.append(factor)
        return torch.full((1,), 0.0 if finite else 1.0, device=self._device)

    def sum_of_squares(self) -> Tensor:
        """One tensor after the other."""
        squares = torch.zeros(1, dtype=torch.float64, device=self._device)
        for grads in self._counted:
            squares += sum_of_squares(self._times(grads))
        return squares

    def multiply_(self, factor: Tensor) -> None:
        """Remember the factor."""
        self._factors.append(factor)

    def settle(self) -> None:
        """The host multiplies."""

    def multiplied(self, shard: Shard) -> Tensor:
        """A copy."""
        return self._times(shard.reduced)

    def _times(self, grads: Tensor) -> Tensor:
        product = grads.to(self._main, copy=True)
        for factor in self._factors:
            product.mul_(factor.to(product.dtype))
        return product


class LateFactorsOfCopies(LateFactors):
    """Reads the device's gradients once, and collects the factors: on a GPU."""

    def settle(self) -> None:
        """The host multiplies."""

    def multiplied(self, shard: Shard) -> Tensor:
        """A copy."""
        grads = shard.reduced.to(shard.grads.dtype)
        return grads if self.factor is None else grads * self.factor


def gradients_of(shards: Sequence[Shard], device: torch.device) -> Gradients:
    """The gradients of ``shards``, handled as is quick on ``device``."""
    cuda = device.type == "cuda"
    if any(shard.on_host for shard in shards):
        return (LateFactorsOfCopies if cuda else FactorsOfCopies)(shards, device)
    return (LateFactors if cuda else FactorsAtOnce)(shards, device)


#: Values per row whose squares are summed in fp32: few enough that the rounding error is negligible in the norm.
_ROW = 256
#: If the sum lies between these, no square has overflowed fp32, and those that underflowed are negligible.
_LEAST, _MOST = 1e-20, 1e30


def sum_of_squares(flat: Tensor) -> Tensor:
    """The sum of the squares of ``flat`` [n], float64 [].

    On a CPU, PyTorch is much slower at summing fp32 values in float64 than in fp32. There each row is summed in fp32
    and the rows' sums in float64, unless the values are so large or so small that fp32 cannot hold their squares.
    """
    if flat.device.type == "cpu" and flat.dtype == torch.float32:
        rows = len(flat) // _ROW * _ROW
        total = _square_norm(torch.linalg.vector_norm(flat[:rows].view(-1, _ROW), dim=1)) + _square_norm(flat[rows:])
        if _LEAST < total < _MOST:
            return total
    return _square_norm(flat)


def _square_norm(flat: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return norm.square()
