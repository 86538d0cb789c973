"""The library's callable for one region and microbatch, between two autograd functions of ours.

They check the order before each replay, report weight gradients after it, and copy tensors that leave the chunk. Other
results of a graph are its own memory, valid until its backward has replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run_engine.capture import Hooks


@dataclass(frozen=True)
class GraphedRegion:
    """``run`` is the library's callable; ``first`` and ``last`` mark the ends of the region's chunk.

    ``differentiable`` says of each output whether it has a gradient: the library marks none as having none.
    """

    run: Callable[..., Any]
    arrivals: tuple[Parameter, ...]
    first: bool
    last: bool
    differentiable: tuple[bool, ...]

    @property
    def has_backward(self) -> bool:
        """Whether any output can be differentiated."""
        return any(self.differentiable)

    def replay(self, hooks: Hooks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replay the region on ``tensors``; differentiable."""
        hooks.before_forward()
        entered = _Enter.apply(self, hooks, *tensors)  # type: ignore[no-untyped-call]  # torch's
        found = self.run(*entered)
        outputs = found if isinstance(found, tuple) else (found,)
        left: tuple[Tensor, ...] = _Leave.apply(self, hooks, *outputs)  # type: ignore[no-untyped-call]  # torch's
        return left


class _Enter(torch.autograd.Function):
    """Identity in the forward; its backward runs after the library's backward."""

    @staticmethod
    def forward(ctx: Any, region: GraphedRegion, hooks: Hooks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.region, ctx.hooks = region, hooks
        ctx.set_materialize_grads(False)  # an input without gradient stays None instead of becoming zeros
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.hooks.after_backward()
        copied = ctx.region.first
        return (None, None, *(g.clone() if copied and g is not None else g for g in gradients))


class _Leave(torch.autograd.Function):
    """Identity in the forward, but for copies; its backward runs before the library's backward."""

    @staticmethod
    def forward(ctx: Any, region: GraphedRegion, hooks: Hooks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.hooks = hooks
        outputs = tuple(tensor.clone() if region.last else tensor.view_as(tensor) for tensor in tensors)
        marked = zip(outputs, region.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in marked if not differentiable))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.hooks.before_backward()
        return (None, None, *gradients)
