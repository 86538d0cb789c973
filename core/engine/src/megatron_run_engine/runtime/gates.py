"""Gates: what is done before a function's backward begins, and after it has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

Act = Callable[[], None]


def in_backward() -> bool:
    """Whether this thread runs a backward; a function that is recomputed runs in one."""
    return torch._C._current_graph_task_id() != -1


def gated(function: Callable[..., Any], inputs: Sequence[Tensor | None], before: Act, after: Act) -> Any:
    """``function(*inputs)``; its backward is preceded by ``before`` and followed by ``after``.

    Tensors that enter ``function`` pass a node that autograd made before all those of ``function``, so it runs last:
    by then the gradients of what ``function`` reads beside them have been computed too.
    """
    found = [index for index, each in enumerate(inputs) if isinstance(each, Tensor) and each.requires_grad]
    entered = list(inputs)
    if found:
        passed = _Entrance.apply(after, *(inputs[index] for index in found))  # type: ignore[no-untyped-call]  # torch's
        for index, each in zip(found, passed, strict=True):
            entered[index] = each
    result = function(*entered)
    outputs = result if isinstance(result, tuple) else (result,)

    def begin(_: Tensor) -> None:
        before()
        if not found:  # nothing in front of the function has a backward
            Variable._execution_engine.queue_callback(after)

    for each in outputs:
        if isinstance(each, Tensor) and each.requires_grad:
            each.register_hook(begin)
    return result


class _Entrance(torch.autograd.Function):
    """The identity; its backward is where that of the function behind it has ended."""

    @staticmethod
    def forward(ctx: Any, after: Act, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.after = after
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.after()
        return None, *grads
