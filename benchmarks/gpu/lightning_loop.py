"""Lightning's loop around the same plain network, where Lightning is installed: Fabric, with its bf16 autocast."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.single.loop import adamw
from benchmarks.single.model import CLIP_NORM, Batch, Side
from benchmarks.single.peers.nanogpt import NanoGpt
from benchmarks.support.shape import Shape


class LightningLoop(Side):
    """``Fabric`` moves the model, casts, and runs the backward; the network is compiled, as nanoGPT's is."""

    def __init__(self, shape: Shape, device: str, *, compiled: bool) -> None:
        fabric: Any = import_module("lightning").Fabric(accelerator=device, devices=1, precision="bf16-mixed")
        model = NanoGpt(shape)
        self._fabric = fabric
        self._model, self._update = fabric.setup(torch.compile(model) if compiled else model, adamw(model.parameters()))

    def step(self, batch: Batch) -> float:
        """One step."""
        losses = []
        for index, (tokens, labels) in enumerate(batch):
            with self._fabric.no_backward_sync(self._model, enabled=index < len(batch) - 1):
                loss = self._model(tokens, labels) / len(batch)
                self._fabric.backward(loss)
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
        self._update.step()
        self._update.zero_grad(set_to_none=True)
        return float(torch.stack(losses).sum().item())
