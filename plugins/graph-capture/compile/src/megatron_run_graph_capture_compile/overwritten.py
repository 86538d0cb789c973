"""Lets a backward write over what its own forward has saved, where the layers wrote over it.

A cut of a graph in forward and backward needs operations without writes. So one that writes, such as that of the
gradient of logits over the logits, becomes one that returns a new value, and the compiler would clone what it writes
over: as an input of the backward it must stay. Here it becomes again what it was, wherever nobody else has that memory.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from torch import Tensor

#: Operations whose result is their first argument.
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def apart(saved: Sequence[Tensor], others: Sequence[Tensor]) -> frozenset[int]:
    """The indices of ``saved`` whose memory neither another of them nor one of ``others`` has."""
    places = [x.untyped_storage().data_ptr() for x in (*saved, *others)]
    return frozenset(index for index, place in enumerate(places[: len(saved)]) if places.count(place) == 1)


def write_over(back: fx.GraphModule, spare: Collection[str]) -> frozenset[str]:
    """Let ``back`` write over its inputs named in ``spare`` instead of over clones; the names of those it writes to.

    It does where an operation with one such argument writes to all of an input that nothing reads afterwards.
    """
    written = set[str]()
    for node in back.graph.find_nodes(op="call_function", target=torch.ops.higher_order.auto_functionalized_v2):
        operation: Any = node.args[0]
        target = _target(node)
        if target is None or target.name not in spare or _read_after(target, node):
            continue
        (name,) = _written(operation)
        arguments = {key: value for key, value in node.kwargs.items() if not key.startswith("_")}
        with back.graph.inserting_before(node):
            back.graph.call_function(operation, (), {**arguments, name: target})
        for user in list(node.users):
            user.replace_all_uses_with(target)
            back.graph.erase_node(user)
        back.graph.erase_node(node)
        written.add(target.name)
    back.graph.eliminate_dead_code()
    back.recompile()
    return frozenset(written)


def _target(node: fx.Node) -> fx.Node | None:
    """The graph's input to all of which ``node`` writes; None for what is written in another way, or elsewhere."""
    operation: Any = node.args[0]
    kwargs: Mapping[str, Any] = node.kwargs
    described = {key for key in kwargs if key.startswith("_")}
    writes = _written(operation)
    if len(writes) != 1 or operation._schema.returns:
        return None
    if described - {f"_{writes[0]}_alias"} != {"_all_bases", f"_{writes[0]}_base_index"}:  # a part of it
        return None
    if not all(user.target is operator.getitem and user.args[1] == 1 for user in node.users):
        return None
    (base,) = kwargs["_all_bases"]
    while base.op == "call_function" and base.target in _SAME:
        base = base.args[0]
    found: fx.Node = base
    return found if found.op == "placeholder" else None


def _written(operation: Any) -> list[str]:
    """The arguments that ``operation`` writes to."""
    return [each.name for each in operation._schema.arguments if each.alias_info and each.alias_info.is_write]


def _read_after(target: fx.Node, node: fx.Node) -> bool:
    """Whether ``target`` or a view of it is read behind ``node``."""
    place = {each: index for index, each in enumerate(node.graph.nodes)}
    return any(place[user] > place[node] for each in _views(target) for user in each.users)


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """``node`` and what shares its memory."""
    yield node
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if schema is not None and any(each.alias_info for each in schema.returns):
            yield from _views(user)
