"""Where the update runs, and masters, main gradients and the rule's state lie: on the device itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run_engine.optim.sharding import give_values, take_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from megatron_run_engine.optim.gradients import Gradients
    from megatron_run_engine.optim.sharding import Shard
    from megatron_run_engine.optim.update import Update
    from megatron_run_engine.runtime.comm import Pending


class Place:
    """The update runs on ``device``, where parameters and gradients are: nothing moves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def keep(self, tensor: Tensor) -> Tensor:
        """The tensor that stands here for ``tensor`` of the device: itself."""
        return tensor

    def parts(self, shards: Sequence[Shard], *, together: bool) -> list[Sequence[Shard]]:
        """The ``shards`` of each update; ``together``: the rule must see all of them."""
        return [shards]

    def begin_step(self) -> None:
        """The gradients of the last step are about to be cleared."""

    def follow(self, shard: Shard, reduction: Pending, *, on_stream: bool) -> None:
        """``reduction`` of the gradients of ``shard`` has begun; ``on_stream``: a stream may wait for it."""

    def take(self, shards: Sequence[Shard]) -> None:
        """The reduced gradients of all ``shards`` have arrived on the device."""
        take_gradients(shards)

    def step(self, updates: Sequence[Update], lr: float, weight_decay: float, gradients: Gradients) -> None:
        """Apply ``updates``, and round their masters to parameters."""
        for update in updates:
            update.step(lr, weight_decay, gradients)

    def give(self, shards: Sequence[Shard]) -> None:
        """Round the masters of ``shards`` to parameters."""
        give_values(shards)

    def settle(self) -> None:
        """Block until nothing is under way: masters, gradients and state are about to be written."""

    def role(self, name: str) -> str:
        """How ``memory`` calls the role ``name`` of what lies here."""
        return name
