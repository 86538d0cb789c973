"""Replays a tape by a loop in Python; ``native`` compiles the same loop in C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_run_graph_capture_partial.tape import Operation, wait


class Call(NamedTuple):
    """One operation of a replay: its ``out=`` overload where one exists, else with ``copies`` to make afterwards."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    copies: tuple[Tensor | None, ...]


def in_python(operations: Sequence[Operation]) -> Callable[[], None]:
    """Replay by calling one operation after the other."""
    calls = [_step(call_of(operation)) for operation in operations]

    def replay() -> None:
        with torch._C._AutoDispatchBelowAutograd():  # the tape was recorded below autograd; record no history
            for call in calls:
                call()

    return replay


def call_of(operation: Operation) -> Call:
    """The call that writes the results of ``operation`` to their recorded addresses."""
    func, args, kwargs, results = operation
    if not any(place is not None for place in results):
        return Call(func, args, dict(kwargs), ())
    found = out_form(func)
    if found is None or len(found[1]) != len(results) or any(place is None for place in results):
        return Call(func, args, dict(kwargs), results)
    form, names = found
    return Call(form, args, {**kwargs, **dict(zip(names, results, strict=True))}, ())


@cache
def out_form(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The overload of ``func`` that also takes its results as arguments, and the names of these."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    packet = func.overloadpacket
    for name in packet.overloads():
        form = getattr(packet, name)
        arguments = form._schema.arguments
        outs = tuple(argument.name for argument in arguments if argument.is_out)
        same = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out] == wanted
        if outs and same and len(outs) == len(func._schema.returns):
            return form, outs
    return None


def _step(call: Call) -> Callable[[], object]:
    """``call`` as a function without arguments."""
    run, args, kwargs, copies = call.func._op, call.args, call.kwargs, call.copies
    if call.func.namespace == "c10d":
        return lambda: wait(run(*args, **kwargs))
    if not copies:
        return lambda: run(*args, **kwargs)

    def run_and_copy() -> None:
        values = (x for x in tree_leaves(run(*args, **kwargs)) if isinstance(x, Tensor))
        for place, value in zip(copies, values, strict=True):
            if place is not None:
                place.copy_(value)

    return run_and_copy
