"""The two gradients of a residual stream that forks before a norm, added where the norm's is written.

A block adds to x what follows from its norm, so that x gets a gradient from the sum and one from the norm. Autograd
adds them by an operation of its own, which reads and writes the stream once more. In a graph the two are seen together:
the kernel of the norm's gradient takes the other one along.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import megatron_run_engine.nn  # noqa: F401  # registers the operation

_aten, _norm = torch.ops.aten, torch.ops.megatron_run_engine.norm_gradients.default
_ADDITIONS = (_aten.add.Tensor, _aten.add_.Tensor)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)


def join_residuals(graph: fx.GraphModule) -> None:
    """Let each norm of ``graph``, whose nodes have fake values, add what alone is added to its gradient."""
    place = {node: index for index, node in enumerate(graph.graph.nodes)}
    for norm in graph.graph.find_nodes(op="call_function", target=_norm):
        found = _addition(norm)
        if found is None:
            continue
        of_x, addition, beside = found
        if place[beside] < place[norm]:
            shape = list(_value(norm.args[1]).shape)
            with graph.graph.inserting_before(norm):
                rows = graph.graph.call_function(_aten.reshape.default, (beside, shape))
                rows.meta["val"] = _value(beside).reshape(shape)
            norm.args = (*norm.args[:5], rows)
            addition.replace_all_uses_with(of_x)
            graph.graph.erase_node(addition)
    graph.recompile()


def _addition(norm: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """The gradient of x in its own shape, the one operation that reads it, if that adds to it, and what it adds."""
    if len(norm.args) > 5 and norm.args[5] is not None:
        return None
    of_x = next((user for user in norm.users if user.target is operator.getitem and user.args[1] == 0), None)
    while of_x is not None and len(of_x.users) == 1:
        (user,) = of_x.users
        if user.target in _ADDITIONS:
            return _checked(of_x, user)
        of_x = user if user.target in _VIEWS else None
    return None


def _checked(of_x: fx.Node, addition: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """As :func:`_addition` says, for tensors of one shape and type that are added as they are."""
    others = [each for each in addition.args if each is not of_x]
    if len(others) != 1 or addition.kwargs or not isinstance(others[0], fx.Node):
        return None
    value, other = _value(of_x), _value(others[0])
    same = value.shape == other.shape and value.dtype == other.dtype and other.is_contiguous()
    return (of_x, addition, others[0]) if same else None


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value
