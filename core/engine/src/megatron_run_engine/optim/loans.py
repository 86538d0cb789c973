"""Buckets that are whole only while a segment needs them: parameters come before it runs, gradients go when it ends.

ZeRO-3 (Rajbhandari et al. 2020, section 5.3), by the segments of layers. A rank keeps its share of parameters and
gradients. The memory of a whole bucket is given to its storage and taken from it; the storage stays, so whatever a
backward has saved of a parameter has its values again once they are gathered. Who reads a parameter that is away reads
NaN, and who adds to a gradient that is away gets torch's error: both are one number, seen in the shape of many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_run_engine.optim.sharding import Keep, Shard
from megatron_run_engine.runtime.gradients import give_main_grad, main_grad, take_main_grad
from megatron_run_engine.runtime.parameter_init import give_memory, initialise, take_memory, without_memory
from megatron_run_engine.runtime.returned_memory import returned_when_freed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.nn import Parameter

    from megatron_run.contracts import ParamInfo
    from megatron_run_engine.optim.buckets import Bucket

    Infos = dict[Parameter, ParamInfo]


class Loan:
    """A ``flat`` buffer whose memory comes and goes, and the tensors that are seen of it: ``views``, by parameter.

    ``show`` makes a tensor that of a parameter; while the memory is away that is ``away`` [], in the parameter's shape.
    """

    def __init__(
        self,
        flat: Tensor,
        views: Mapping[Parameter, Tensor],
        away: Tensor,
        show: Callable[[Parameter, Tensor], None],
    ) -> None:
        self._flat, self._show = flat, show
        self._views = {parameter: (view, away.expand(view.shape)) for parameter, view in views.items()}

    def give(self) -> None:
        """Give it memory, without values."""
        with returned_when_freed(self._flat.device):
            give_memory((self._flat,))
        for parameter, (view, _) in self._views.items():
            self._show(parameter, view)

    def take_back(self) -> None:
        """Take its memory."""
        for parameter, (_, away) in self._views.items():
            self._show(parameter, away)
        take_memory(self._flat)


def _set_data(parameter: Parameter, values: Tensor) -> None:
    parameter.data = values


class LentValues:
    """Whole parameters of a bucket, ``values``, on loan; ``share`` is what this rank keeps, the part ``own`` of them.

    Parameters that were built without memory are still to be given values.
    """

    def __init__(self, bucket: Bucket, values: Tensor, share: Tensor, own: Tensor, fresh: Infos) -> None:
        self.bucket, self.values, self._share, self._own, self._fresh = bucket, values, share, own, fresh
        views = {parameter: parameter.data for parameter in bucket.parameters}
        self._loan = Loan(values, views, share.new_full((), torch.nan), _set_data)

    @classmethod
    def frozen(cls, bucket: Bucket, owned: range) -> LentValues:
        """Those of parameters that are not trained: no masters, and no gradients."""
        fresh = _without_values(bucket)
        values = bucket.flatten_parameters()
        own = values[owned.start : owned.stop]
        for parameter in bucket.parameters:
            take_main_grad(parameter)
        return cls(bucket, values, _fill(torch.empty_like(own), own, fresh), own, fresh)

    @property
    def kept(self) -> int:
        """Bytes of the share."""
        return self._share.nbytes

    def initialise(self, seed: int) -> None:
        """Give values to parameters without, and take the memory back."""
        if self._fresh:
            self._loan.give()
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


class Kept(NamedTuple):
    """The part of one bucket that a rank keeps; ``masters`` are empty where they lie elsewhere, or are the values."""

    values: Tensor
    gradients: Tensor
    masters: Tensor


class Room:
    """Memory for what a rank keeps of lent buckets of one type: each part allocated once, so that it leaves no gaps.

    There are values, gradients in the type ``main`` and, where types differ and ``masters`` lie here too, those.
    """

    def __init__(self, values: int, like: Tensor, main: torch.dtype, *, masters: bool = True) -> None:
        self._values = like.new_empty(values)
        self._gradients = like.new_zeros(values, dtype=main)
        self._masters = like.new_empty(values if masters and like.dtype != main else 0, dtype=main)
        self._taken = 0

    def take(self, values: int) -> Kept:
        """The next ``values`` of each part."""
        place = slice(self._taken, self._taken + values)
        self._taken += values
        return Kept(self._values[place], self._gradients[place], self._masters[place])


class LentShard(Shard):
    """This rank's share of a bucket, in ``room``, and no more between two uses.

    ``reduced`` has the type ``main`` whatever that of the bucket's gradients: several reductions add to it.
    """

    def __init__(
        self,
        bucket: Bucket,
        updated: range,
        owned: range,
        main: torch.dtype,
        room: Room,
        keep: Keep = lambda tensor: tensor,
    ) -> None:
        self._fresh = _without_values(bucket)
        self._room_taken = room.take(len(updated))
        super().__init__(bucket, updated, owned, main, keep)
        if self.has_masters and not self.on_host:
            self.masters = self._room_taken.masters.copy_(self.masters)
        self.lent = LentValues(bucket, self.values, self.rounded, self._own_values, self._fresh)
        gradients = {parameter: main_grad(parameter) for parameter in bucket.parameters}
        self._gradients = Loan(bucket.grad, gradients, bucket.grad.new_zeros(()), give_main_grad)

    def initialise(self, seed: int) -> None:
        """Give values to parameters that were built without memory, and take the memory of the bucket."""
        self.lent.initialise(seed)
        if self.has_masters:
            self.masters.copy_(self.rounded)
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
        self._own_values = self.cut(self.values)  # a view is made while there is memory
        taken = self._room_taken
        return _fill(taken.values, self._own_values, self._fresh), taken.gradients


def _without_values(bucket: Bucket) -> Infos:
    """All parameters of ``bucket`` if one was built without memory: the others have initial values too."""
    return bucket.infos if without_memory(bucket.infos) else {}


def _fill(share: Tensor, own: Tensor, fresh: Infos) -> Tensor:
    """``share`` with the values of this rank's part ``own`` of the whole; with none if they are still to come."""
    if fresh:
        take_memory(own)
        return share
    return share.copy_(own)
