"""Reports weight gradients that Transformer Engine computes by itself to the engine.

A weight gradient reaches ``main_grad`` in one of three ways. By default a module returns it to autograd, and the
engine's hook adds it. A fused module adds it to ``main_grad`` itself and returns nothing, so its arrival must be
reported. A delayed module keeps its inputs until ``backward_dw()``, which the engine calls at once or in action W.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_run_engine.runtime.gradients import main_grad

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Parameter

    from megatron_run_parallel_layer_te.tools import Tools


class WeightGradient:
    """The gradient of the ``weight`` of one ``module``, a linear layer of Transformer Engine."""

    def __init__(self, tools: Tools, module: Any, weight: Parameter) -> None:
        self._gradients, self._module, self._weight = tools.context.gradients, module, weight
        self._delayed = tools.options.delay_weight_gradients
        self._unseen = self._delayed or tools.options.fuse_weight_gradients

    def watch(self, x: Tensor) -> Tensor:
        """Return the module's input x, marked: the end of the module's backward submits its weight gradient."""
        if not (self._unseen and self._weight.requires_grad and torch.is_grad_enabled()):
            return x
        return after_backward(x, self._hand_over)

    def _hand_over(self) -> None:
        self._gradients.submit((self._weight,), self._finish)

    def _finish(self) -> None:
        """Compute a delayed gradient, first in, first out, and move it out of ``.grad``.

        If a schedule mixes whole and split backwards, W may finish another microbatch's gradient: only the sum counts.
        """
        if self._delayed:
            self._module.backward_dw()
        if self._weight.grad is not None:  # backward_dw sets it outside autograd, so the engine's hook did not run
            main_grad(self._weight).add_(self._weight.grad)
            self._weight.grad = None


def after_backward(x: Tensor, act: Callable[[], None]) -> Tensor:
    """Return x [*] unchanged; the backward calls ``act`` when it reaches x."""
    # The anchor makes autograd run this backward even if x requires no gradient.
    anchor = torch.empty(0, requires_grad=True)
    result: Tensor = _AfterBackward.apply(x, anchor, act)  # type: ignore[no-untyped-call]  # torch's
    return result


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.act()
        return grads[0], None, None
