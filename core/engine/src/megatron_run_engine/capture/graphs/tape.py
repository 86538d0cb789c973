"""The backend of CPUs: a tape of operations with fixed addresses, under the rules of a CUDA graph.

During recording, operations run below autograd and their results move into the arena; the tape keeps their addresses
without keeping them alive. A replay runs the same operations on the same addresses, without a module's Python. So
results equal those of eager steps bit for bit, and a wrong order corrupts memory exactly as it would on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_run_engine.capture.graphs.arena import Arena
from megatron_run_engine.capture.graphs.backend import weak_alias
from megatron_run_engine.capture.rules import Rules, unwritten
from megatron_run_engine.runtime import tensors_in, with_tensors

_aten = torch.ops.aten
#: Operations with uninitialised results: there is nothing to replay.
WITHOUT_VALUES = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)


class Operation(NamedTuple):
    """One recorded operation: addresses of its arguments and of its new results (None: a view of an argument)."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Tensor | None, ...]


class TapeBackend:
    """Makes tapes, whose operations may draw from ``generators``."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators

    def pool(self) -> Arena:
        """A new arena."""
        return Arena()

    def graph(self) -> Tape:
        """An empty tape."""
        return Tape(self._generators)

    def pool_bytes(self, pools: Iterable[Arena]) -> int:
        """The sum of the arenas' peaks."""
        return sum(pool.peak for pool in pools)


class Recorder(Rules):
    """Runs operations under the rules of capture, moves new results into ``pool`` and records the operations.

    ``kept`` holds tensors outside the pool, by address: parameters, gradients, static inputs.
    """

    def __init__(self, pool: Arena, generators: Sequence[torch.Generator]) -> None:
        super().__init__(generators)
        self._pool = pool
        self.operations: list[Operation] = []
        self.kept: dict[int, Tensor] = {}

    def is_ours(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is in the pool."""
        return self._pool.owns(tensor)

    def perform(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record ``func`` and run it, unless it only writes outside the pool: a capture must not change parameters."""
        collective = func.namespace == "c10d"
        places = self._places(args), self._places(dict(kwargs))
        if self.writes_outside(func, args, kwargs):
            self.operations.append(Operation(func, *places, ()))
            return unwritten(func, args, kwargs)
        result = func(*args, **kwargs)
        if collective:
            result = _done(result)
        moved = self._move(func, args, kwargs, result)
        written = func._schema.is_mutable or collective
        if func not in WITHOUT_VALUES and (written or any(place is not None for place in moved.places)):
            self.operations.append(Operation(func, *places, moved.places))
        return moved.result

    def _places(self, arguments: Any) -> Any:
        """``arguments`` with each tensor replaced by a weak alias."""
        return with_tensors(arguments, self._place)

    def _place(self, tensor: Tensor) -> Tensor:
        if not self._pool.owns(tensor):
            self.kept.setdefault(tensor.data_ptr(), tensor.detach())
        return weak_alias(tensor)

    def _move(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> _Moved:
        """``result`` with new tensors moved into the pool; views of arguments stay in place."""
        given = {x.untyped_storage()._cdata for x in tensors_in((args, kwargs))}
        places: list[Tensor | None] = []

        def move(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata in given:
                places.append(None)
                return tensor
            moved = self._pool.like(tensor)
            if func not in WITHOUT_VALUES:
                moved.copy_(tensor)
            places.append(weak_alias(moved))
            return moved

        return _Moved(with_tensors(result, move), tuple(places))


class Tape:
    """Operations in the order in which they ran; ``recorder`` is the kind of mode that records them."""

    recorder = Recorder

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self._pool: Arena | None = None
        self._kept: dict[int, Tensor] = {}
        self._steps: list[Callable[[], object]] = []
        self.operations: tuple[Operation, ...] = ()

    @contextmanager
    def capture(self, pool: Arena) -> Iterator[None]:
        """Record inside the context, without garbage collection, so that reference counts alone free blocks."""
        collects = gc.isenabled()
        gc.disable()
        try:
            with self.recorder(pool, self._generators) as recorder:
                yield
        finally:
            if collects:
                gc.enable()
        self._pool, self._kept = pool, recorder.kept
        self.operations = tuple(recorder.operations)
        self._steps = [_step(call_of(operation)) for operation in self.operations]

    def replay(self) -> None:
        """Run the operations below autograd, where they were recorded: a replay leaves no history."""
        with torch._C._AutoDispatchBelowAutograd():
            for step in self._steps:
                step()


class _Moved(NamedTuple):
    result: Any
    places: tuple[Tensor | None, ...]


def _done(result: Any) -> Any:
    """Wait for the collective of ``result``, and return it with a completed work object in place of its own.

    The layer will wait again, and a wait may copy: gloo's reduce-scatter copies this rank's part out of an internal
    buffer only then. Recorded as an operation, that copy would restore the buffer's present contents in every replay.
    """
    *others, work = result if isinstance(result, tuple | list) else (result,)
    if not hasattr(work, "wait"):
        return result
    from torch._C._distributed_c10d import FakeWork

    work.wait()
    done = FakeWork().boxed()
    return (*others, done) if others else done


def wait(result: Any) -> None:
    """Wait for a collective, which returns its work last, so that it is done before the next recorded operation."""
    work = result[-1] if isinstance(result, tuple | list) else result
    if hasattr(work, "wait"):
        work.wait()


class Call(NamedTuple):
    """One operation of a replay: its ``out=`` overload where one exists, else with ``copies`` to make afterwards."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    copies: tuple[Tensor | None, ...]


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
        for place, value in zip(copies, tensors_in(run(*args, **kwargs)), strict=True):
            if place is not None:
                place.copy_(value)

    return run_and_copy
