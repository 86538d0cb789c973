"""The backend of CPUs: a tape of operations with fixed addresses, under the rules of a CUDA graph.

During recording, operations run below autograd and their results move into the arena; the tape keeps their addresses
without keeping them alive. A replay runs the same operations on the same addresses, without a module's Python. So
results equal those of eager steps bit for bit, and a wrong order corrupts memory exactly as it would on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_run_engine.capture import Rules, unwritten
from megatron_run_graph_capture_partial.arena import Arena
from megatron_run_graph_capture_partial.backend import weak_alias

_aten = torch.ops.aten
#: Operations with uninitialised results: there is nothing to replay.
_WITHOUT_VALUES = (
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


#: Turns operations into a function that replays them.
Executor = Callable[[Sequence[Operation]], Callable[[], None]]


class TapeBackend:
    """Makes tapes, which ``executor`` replays; operations may draw from ``generators``."""

    def __init__(self, generators: Sequence[torch.Generator], executor: Executor) -> None:
        self._generators, self._executor = generators, executor

    def pool(self) -> Arena:
        """A new arena."""
        return Arena()

    def graph(self) -> Tape:
        """An empty tape."""
        return Tape(self._generators, self._executor)

    def pool_bytes(self, pools: Iterable[Arena]) -> int:
        """The sum of the arenas' peaks."""
        return sum(pool.peak for pool in pools)


class Tape:
    """Operations in the order in which they ran."""

    def __init__(self, generators: Sequence[torch.Generator], executor: Executor) -> None:
        self._generators, self._executor = generators, executor
        self._pool: Arena | None = None
        self._kept: dict[int, Tensor] = {}
        self._run: Callable[[], None] = _nothing
        self.operations: tuple[Operation, ...] = ()

    @contextmanager
    def capture(self, pool: Arena) -> Iterator[None]:
        """Record inside the context, without garbage collection, so that reference counts alone free blocks."""
        collects = gc.isenabled()
        gc.disable()
        try:
            with _Recorder(pool, self._generators) as recorder:
                yield
        finally:
            if collects:
                gc.enable()
        self._pool, self._kept = pool, recorder.kept
        self.operations = tuple(recorder.operations)
        self._run = self._executor(self.operations)

    def replay(self) -> None:
        """Run the operations below autograd."""
        self._run()


def _nothing() -> None:
    """Replay an empty tape."""


class _Recorder(Rules):
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
        if func not in _WITHOUT_VALUES and (written or any(place is not None for place in moved.places)):
            self.operations.append(Operation(func, *places, moved.places))
        return moved.result

    def _places(self, arguments: Any) -> Any:
        """``arguments`` with each tensor replaced by a weak alias."""
        return tree_map_only(Tensor, self._place, arguments)

    def _place(self, tensor: Tensor) -> Tensor:
        if not self._pool.owns(tensor):
            self.kept.setdefault(tensor.data_ptr(), tensor.detach())
        return weak_alias(tensor)

    def _move(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> _Moved:
        """``result`` with new tensors moved into the pool; views of arguments stay in place."""
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        places: list[Tensor | None] = []

        def move(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata in given:
                places.append(None)
                return tensor
            moved = self._pool.like(tensor)
            if func not in _WITHOUT_VALUES:
                moved.copy_(tensor)
            places.append(weak_alias(moved))
            return moved

        return _Moved(tree_map_only(Tensor, move, result), tuple(places))


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
