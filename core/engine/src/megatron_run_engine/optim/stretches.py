"""Stretches: ranges of a shard whose values have equal hyperparameters, as parameters of PyTorch's optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch.nn import Parameter

if TYPE_CHECKING:
    from megatron_run.contracts import Part
    from megatron_run_engine.optim.sharding import Shard


class Hyperparameters(NamedTuple):
    """Hyperparameters that values must share to be updated together. ``by_rest``: ``UpdateRule.rest`` updates them."""

    decays: bool
    lr_mult: float
    by_rest: bool


@dataclass(frozen=True, eq=False)
class Stretch:
    """The range ``in_bucket`` of the shard's bucket as a parameter with a gradient, as PyTorch's optimizers expect it.

    It is flat or, if the rule needs whole tensors, what this rank holds of the logical tensor ``part``, in its shape.
    """

    shard: Shard
    in_bucket: range
    group: Hyperparameters
    values: Parameter
    part: Part | None = None

    @classmethod
    def of(
        cls,
        shard: Shard,
        in_bucket: range,
        group: Hyperparameters,
        shape: tuple[int, ...] = (-1,),
        part: Part | None = None,
    ) -> Stretch:
        """The stretch of ``in_bucket``; its values and gradient are views of the shard's."""
        values = Parameter(shard.masters[shard.local(in_bucket)].view(shape))
        values.grad = shard.grads[shard.local(in_bucket)].view(shape)
        return cls(shard, in_bucket, group, values, part)
