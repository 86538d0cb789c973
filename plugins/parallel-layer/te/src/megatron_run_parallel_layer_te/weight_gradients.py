"""Weight gradients that Transformer Engine computes by itself, made known to the kernel.

Three ways lead into ``main_grad``. Left alone, a module returns its weight gradient to autograd, and the kernel's hook
moves it. A fused module adds it to ``main_grad`` and returns nothing, so the kernel must be told that it arrived. A
delayed one keeps what it needs until ``backward_dw()``, which the kernel calls: at once, or in action W.
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
    """Of the ``weight`` of one ``module``, a linear layer of Transformer Engine."""

    def __init__(self, tools: Tools, module: Any, weight: Parameter) -> None:
        self._gradients, self._module, self._weight = tools.context.gradients, module, weight
        self._delayed = tools.options.delay_weight_gradients
        self._unseen = self._delayed or tools.options.fuse_weight_gradients

    def watch(self, x: Tensor) -> Tensor:
        """The module's input x, marked: when the module's backward is done, its weight gradient is handed over."""
        if not (self._unseen and self._weight.requires_grad and torch.is_grad_enabled()):
            return x
        return after_backward(x, self._hand_over)

    def _hand_over(self) -> None:
        self._gradients.submit((self._weight,), self._finish)

    def _finish(self) -> None:
        """Compute what was delayed, first in, first out, and leave nothing in ``.grad``.

        When schedules mix whole and split backwards, W may finish another microbatch's: only their sum counts.
        """
        if self._delayed:
            self._module.backward_dw()
        if self._weight.grad is not None:  # set by backward_dw, of which autograd and its hooks know nothing
            main_grad(self._weight).add_(self._weight.grad)
            self._weight.grad = None


def after_backward(x: Tensor, act: Callable[[], None]) -> Tensor:
    """Return x [*] as it is; ``act`` is called when the gradient of what was computed from it has been."""
    # The anchor makes autograd come here even when nobody asks for the gradient of x.
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
