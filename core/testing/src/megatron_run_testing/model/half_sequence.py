"""Layers that look as if two ranks split the sequence, for checks of shapes on one.

Legend: s sequence, b micro batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_run.contracts import Init, LinearSpec, StackedLayers


class HalfSequence(StackedLayers):
    """Layers between which x is [s/2, b, h]; split layers see [s, b, h], whose second half is a copy of the first.

    They test the shapes of a model without another rank; its values are meaningless.
    """

    def column_linear(self, spec: LinearSpec, norm: nn.Module | None = None) -> nn.Module:
        """A layer that enters the region."""
        return _entering(super().column_linear(spec, norm))

    def row_linear(self, spec: LinearSpec) -> nn.Module:
        """A layer that leaves the region."""
        return _leaving(super().row_linear(spec))

    def vocab_embedding(self, vocab: int, hidden: int, *, init: Init) -> nn.Module:
        """A layer that leaves the region: every rank has all tokens."""
        return _leaving(super().vocab_embedding(vocab, hidden, init=init))

    def output_layer(self, vocab: int, hidden: int, *, init: Init, weight: Parameter | None = None) -> nn.Module:
        """A layer that enters the region."""
        return _entering(super().output_layer(vocab, hidden, init=init, weight=weight))

    def enter_region(self, x: Tensor) -> Tensor:
        """Repeat the half as the missing one: [s/2, b, *] -> [s, b, *]."""
        return torch.cat([x, x])

    def leave_region(self, x: Tensor) -> Tensor:
        """Keep the first half: [s, b, *] -> [s/2, b, *]."""
        return x[: len(x) // 2]


def _entering(layer: nn.Module) -> nn.Module:
    """``layer`` with its input [s/2, ...] extended to [s, ...]."""

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return torch.cat([inputs[0], inputs[0]]), *inputs[1:]

    layer.register_forward_pre_hook(enter)
    return layer


def _leaving(layer: nn.Module) -> nn.Module:
    """``layer`` with its output [s, ...] cut to [s/2, ...]."""

    def leave(_: nn.Module, __: tuple[Any, ...], y: Tensor) -> Tensor:
        return y[: len(y) // 2]

    layer.register_forward_hook(leave)
    return layer
