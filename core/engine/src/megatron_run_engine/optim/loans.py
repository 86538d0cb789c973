"""Buckets that are whole only while a segment needs them: parameters come before it runs, gradients go when it ends.

ZeRO-3 (Rajbhandari et al. 2020, section 5.3), by the segments of layers. A rank keeps its share of parameters and
gradients. The memory of a whole bucket is given to its storage and taken from it; the storage stays, so whatever a
backward has saved of a parameter has its values again once they are gathered. Who reads a parameter that is away reads
NaN, and who adds to a gradient that is away gets torch's error: both are one number, seen in the shape of many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_run_engine.optim.sharding import Shard
from megatron_run_engine.runtime.gradients import give_main_grad, take_main_grad
from megatron_run_engine.runtime.parameter_init import initialise, without_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Parameter

    from megatron_run.contracts import ParamInfo
    from megatron_run_engine.optim.buckets import Bucket

    Infos = dict[Parameter, ParamInfo]


class Loan:
    """A ``flat`` buffer in the layout of ``bucket`` whose memory comes and goes, and the tensors that are seen of it.

    ``show`` makes a tensor that of a parameter; while the memory is away that is ``away`` [], in the parameter's shape.
    """

    def __init__(self, bucket: Bucket, flat: Tensor, away: Tensor, show: Callable[[Parameter, Tensor], None]) -> None:
        self._flat, self._show = flat, show
        self._views = {p: (bucket.view(flat, p), away.expand(p.shape)) for p in bucket.parameters}

    def give(self) -> None:
        """Give it memory, without values."""
        if self._flat.device.type != "meta":
            self._flat.untyped_storage().resize_(self._flat.nbytes)
        for parameter, (view, _) in self._views.items():
            self._show(parameter, view)

    def take_back(self) -> None:
        """Take its memory."""
        for parameter, (_, away) in self._views.items():
            self._show(parameter, away)
        if self._flat.device.type != "meta":
            self._flat.untyped_storage().resize_(0)


def _set_data(parameter: Parameter, values: Tensor) -> None:
    parameter.data = values


class LentValues:
    """Whole parameters of a bucket, ``values``, on loan; ``share`` is what this rank keeps, the part ``own`` of them.

    Parameters that were built without memory are still to be given values.
    """

    def __init__(self, bucket: Bucket, values: Tensor, share: Tensor, own: Tensor, fresh: Infos) -> None:
        self.bucket, self.values, self._share, self._own, self._fresh = bucket, values, share, own, fresh
        self._loan = Loan(bucket, values, values.new_full((), torch.nan), _set_data)

    @classmethod
    def frozen(cls, bucket: Bucket, owned: range) -> LentValues:
        """Those of parameters that are not trained: no masters, and no gradients."""
        fresh = without_memory(bucket.infos)
        values = bucket.flatten_parameters()
        own = values[owned.start : owned.stop]
        for parameter in bucket.parameters:
            take_main_grad(parameter)
        return cls(bucket, values, own.clone(), own, fresh)

    @property
    def kept(self) -> int:
        """Bytes of the share."""
        return self._share.nbytes

    def initialise(self, seed: int) -> None:
        """Give values to parameters without, and take the memory back."""
        initialise(self._fresh, seed)
        self._fresh = {}
        self.keep()
        self.take_back()

    def lend(self) -> None:
        """Give the whole memory, and this rank's part of it values."""
        self._loan.give()
        self._own.copy_(self._share)

    def keep(self) -> None:
        """Take over this rank's part of what was written to the whole parameters."""
        self._share.copy_(self._own)

    def take_back(self) -> None:
        """Take the whole memory."""
        self._loan.take_back()


class LentShard(Shard):
    """This rank's share of a bucket, and no more between two uses.

    ``reduced`` has the type ``main`` whatever that of the bucket's gradients: several reductions add to it.
    """

    def __init__(self, bucket: Bucket, updated: range, owned: range, main: torch.dtype) -> None:
        fresh = without_memory(bucket.infos)
        super().__init__(bucket, updated, owned, main)
        self.lent = LentValues(bucket, self.values, self._values, self.cut(self.values), fresh)
        self._gradients = Loan(bucket, bucket.grad, bucket.grad.new_zeros(()), give_main_grad)

    def initialise(self, seed: int) -> None:
        """Give values to parameters that were built without memory, and take the memory of the bucket."""
        self.lent.initialise(seed)
        if self.has_masters:
            self.masters.copy_(self._values)
        self._gradients.take_back()

    @property
    def values_kept(self) -> int:
        """Bytes of parameters between steps; masters of the same type are these."""
        return self.lent.kept

    @property
    def gradients_kept(self) -> int:
        """Bytes of gradients between steps."""
        return self.reduced.nbytes

    def lend_gradients(self) -> None:
        """Give the bucket's gradients memory, and set them to zero."""
        self._gradients.give()
        self.bucket.grad.zero_()

    def add_reduced(self) -> None:
        """Add what has been reduced to ``reduced``, and take the bucket's memory."""
        self.reduced.add_(self.cut(self.bucket.grad))
        self._gradients.take_back()

    def _kept(self, main: torch.dtype) -> tuple[Tensor, Tensor]:
        values = self.cut(self.values)
        return values.clone(), torch.zeros_like(values, dtype=main)
