"""A training loop in plain PyTorch, as nanoGPT's: what a module costs when nothing stands around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from benchmarks.single.model import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Batch, Precision, Side


def adamw(parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """The update of every side: matrices decay, vectors do not."""
    everything = list(parameters)
    decayed, rest = ([p for p in everything if (p.dim() > 1) == decays] for decays in (True, False))
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)


class PlainLoop(Side):
    """Trains ``model`` by ``loss``, from tokens and labels to a mean; bf16 is autocast over fp32 weights."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], precision: Precision) -> None:
        self._parameters, self._loss = list(model.parameters()), loss
        self._device = self._parameters[0].device
        self._autocast = torch.autocast(self._device.type, torch.bfloat16, enabled=precision == "bf16")
        self._update = adamw(self._parameters)

    def step(self, batch: Batch) -> float:
        """One step; the first microbatch adds its gradient to nothing."""
        total = torch.zeros((), device=self._device)
        for tokens, labels in batch:
            with self._autocast:
                loss = self._loss(tokens, labels) / len(batch)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM)
        self._update.step()
        self._update.zero_grad(set_to_none=True)
        return total.item()
