"""The gradients with which losses start their backwards: of means over microbatches, or over a global batch's tokens.

With ``train.loss_mean=token`` each loss that counts tokens (:meth:`Model.counts`) is divided by the number of its own
over the whole global batch, which every rank with a head must know before its first backward. Such ranks therefore load
a step's samples before its first forward, and add up what they count.

Every other loss stays a mean over microbatches. The losses of routers are means over all tokens that experts see,
masked ones among them, so their coefficients weigh the same whatever the masks are. Megatron-LM multiplies them by
positions and divides by counted tokens (``--calculate-per-token-loss``): there a batch of which one token in ten counts
balances its experts ten times as hard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_run_engine.runtime.losses import LANGUAGE_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from megatron_run.contracts import Microbatch
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.training.build import Assembly


class LossWeights:
    """Weighs the losses of a step on one rank."""

    def __init__(self, run: ResolvedRun, assembly: Assembly) -> None:
        self._assembly, self._copies, self._pieces = assembly, run.sizes.data, run.sizes.context
        self._by_token = run.config.train.loss_mean == "token"
        self._has_head = len(run.layout) - 1 in assembly.positions
        #: What each loss counts in the global batch, fp32 scalars at fixed addresses: a graph of a step reads them.
        self._counts: dict[str, Tensor] = {}

    def start_step(self, microbatches: int, load: Callable[[int], Microbatch]) -> Callable[[int], Microbatch]:
        """Count what the losses of a step of ``microbatches`` count; the loader to use instead of ``load``.

        Collective over the replicas of the head, and only with ``loss_mean=token``.
        """
        if not (self._by_token and self._has_head):
            return load
        loaded = {index: load(index) for index in range(microbatches)}
        counted = [self._assembly.model.counts(microbatch.fields) for microbatch in loaded.values()]
        names = list(counted[0])
        totals = torch.stack([torch.stack([each[name].double() for each in counted]).sum() for name in names])
        self._assembly.context.groups.sum_(totals, "replicas")
        for name, total in zip(names, totals.clamp(min=1).float().unbind(), strict=True):
            self._counts.setdefault(name, torch.empty_like(total)).copy_(total)
        return loaded.pop

    def seed(self, microbatches: int, name: str, weight: Tensor) -> Tensor:
        """The gradient of the loss ``name`` of one microbatch, loss scale included: a scalar.

        ``weight`` is what this rank counts of the microbatch. Gradients of the data-parallel ranks are averaged
        afterwards, and those of context-parallel ranks summed: the loss over tokens is divided by what all of them
        count, any other by their number. Collective over the context-parallel ranks.
        """
        scale = self._assembly.scaler.scale
        if name in self._counts:
            return (scale * (self._copies / self._counts[name])).reshape(())
        per = torch.full_like(weight, self._pieces, dtype=torch.float32)
        if name == LANGUAGE_MODEL:
            if self._pieces > 1:
                weight = self._assembly.context.groups.sum_(weight.clone(), "context")
            # A microbatch whose loss mask is all zero has weight 0: clamp, or its gradient is 0/0.
            per = weight.clamp(min=1).float()
        return (scale / (microbatches * per)).reshape(())
