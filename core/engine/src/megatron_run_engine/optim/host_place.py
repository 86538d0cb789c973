"""Masters, main gradients and the rule's state in host memory, where the update runs (Ren et al. 2021, ZeRO-Offload).

The device keeps parameters and gradients. Reduced gradients of a bucket are copied to the host beside the rest of the
backward, as soon as they have arrived. Norms are taken on the device, so that the host need not wait for the copies
before it knows whether to update. The update goes bucket by bucket: it waits for the gradients of one, and its new
values, rounded on the host to the type of parameters, go back beside the update of the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_run_engine.optim.place import Place
from megatron_run_engine.optim.sharding import take_gradients
from megatron_run_engine.runtime.copies import make_copies, nothing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from megatron_run_engine.optim.gradients import Gradients
    from megatron_run_engine.optim.sharding import Shard
    from megatron_run_engine.optim.update import Update
    from megatron_run_engine.runtime.comm import Pending


class HostPlace(Place):
    """The update runs on the host, for parameters on ``device``; while a run is planned all is on the meta device.

    What copies read or write is pinned on CUDA. Masters of 16-bit parameters and the rule's state are not: no copy
    touches them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device if device.type == "meta" else torch.device("cpu"))
        self._out = make_copies(device, to_host=True)
        #: Its stream is free while gradients are still on their way.
        self._few = make_copies(device, to_host=True)
        self._back = make_copies(device, to_host=False)
        #: Of shards whose gradients are on their way or have arrived, and are not used yet: the event of the copy.
        self._coming: dict[Shard, Any] = {}
        self._events: dict[str, Any] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` in host memory."""
        return self._like(tensor).copy_(tensor.detach())

    def parts(self, shards: Sequence[Shard], *, together: bool) -> list[Sequence[Shard]]:
        """Each alone, so that copies and updates overlap."""
        return [shards] if together else [[shard] for shard in shards]

    def begin_step(self) -> None:
        """Let the device clear no gradients that are still to be copied: those of a skipped step."""
        self._coming.clear()
        if "out" in self._events:
            self._out.wait(self._events["out"])

    def follow(self, shard: Shard, reduction: Pending, *, on_stream: bool) -> None:
        """Copy the gradients of ``shard`` as soon as they are reduced, unless the host would have to wait for that."""
        if on_stream:
            self._send(shard, reduction)

    def take(self, shards: Sequence[Shard]) -> None:
        """Start to copy the gradients of the ``shards`` that have not left yet."""
        for shard in shards:
            if shard not in self._coming:
                self._send(shard)

    @torch.no_grad()
    def step(self, updates: Sequence[Update], lr: float, weight_decay: float, gradients: Gradients) -> None:
        """Update by update: wait for the gradients, apply the rule, start to copy what it has changed."""
        if "back" in self._events:
            self._back.finish(self._events["back"])  # it reads fp32 masters, which change now
        factors = self._fetch(gradients.factors, [shard for update in updates for shard in update.shards])
        for update in updates:
            self._arrive(update.shards, factors)
            update.apply(lr, weight_decay)
            self._start_back(update.shards)
        self._arrive_back()
        gradients.arrived()

    def give(self, shards: Sequence[Shard]) -> None:
        """Round the masters of ``shards``, and copy them to the device, whose further work waits for that."""
        self._start_back(shards)
        self._arrive_back()

    def settle(self) -> None:
        """Block until no copy reads or writes host memory."""
        if "out" in self._events:
            self._out.finish(self._events["out"])
        if "back" in self._events:
            self._back.finish(self._events["back"])

    def role(self, name: str) -> str:
        """Of host memory."""
        return f"host_{name}"

    def _send(self, shard: Shard, reduction: Pending | None = None) -> None:
        if not shard.updated:
            return
        after = nothing if reduction is None else reduction.wait
        self._coming[shard] = self._events["out"] = self._out.start([(shard.arrived, shard.reduced)], after)

    def _fetch(self, factors: Iterable[Tensor], shards: Iterable[Shard]) -> list[Tensor]:
        """The ``factors`` on the host; the masters of parameters that the model itself moves become what they are."""
        here = [(self._like(factor), factor) for factor in factors]
        if pairs := [*here, *(pair for shard in shards for pair in _moved(shard))]:
            self._few.finish(self._few.start(pairs))
        return [target for target, _ in here]

    def _arrive(self, shards: Sequence[Shard], factors: Sequence[Tensor]) -> None:
        """Wait for the gradients of ``shards``, and multiply them by ``factors``, once."""
        arrived = [shard for shard in shards if shard in self._coming]
        for shard in arrived:
            self._out.finish(self._coming.pop(shard))
        take_gradients(arrived)
        for shard in arrived:
            for factor in factors:
                shard.grads.mul_(factor.to(shard.grads.dtype))

    def _start_back(self, shards: Sequence[Shard]) -> None:
        pairs = [(shard.rounded, self._in_type_of(shard.rounded, shard.masters)) for shard in shards if shard.updated]
        if pairs:
            self._events["back"] = self._back.start(pairs)

    def _arrive_back(self) -> None:
        if "back" in self._events:
            self._back.wait(self._events["back"])  # copies run in their order: this is the last one

    def _in_type_of(self, like: Tensor, masters: Tensor) -> Tensor:
        return masters.detach() if masters.dtype == like.dtype else self._like(like).copy_(masters)

    def _like(self, tensor: Tensor) -> Tensor:
        """Host memory for what ``tensor`` has, which copies can use."""
        return self._out.buffer(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def _moved(shard: Shard) -> list[tuple[Tensor, Tensor]]:
    """Masters, and parameters of the same type that the model moves beside the update, as biases of routers."""
    if shard.masters.dtype != shard.rounded.dtype:
        return []
    runs = [shard.local(run) for moved, run in shard.runs(lambda info: info.moved, shard.updated) if moved]
    return [(shard.masters[run], shard.rounded[run]) for run in runs]
