"""Graphs on a CPU that hold what CUDA graphs hold: the memory of their pool, and addresses.

A tape that is made here keeps no tensor. Its pool is cut from the memory of the :class:`Device` around it, and goes
back there with its last graph. What a recording frees in the pool may be given to the next operation, so each replay
fills it with NaN where the recording has freed it. A recording leaves no values behind, only replays do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_run_engine.capture.graphs import weak_alias
from megatron_run_engine.capture.graphs.arena import Arena
from megatron_run_engine.capture.graphs.tape import Operation, Recorder, Tape, TapeBackend
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_graph_capture_partial.capture import PartialCapture, PartialOptions
from tests.support.device_memory import POISON, Memory

_fill = torch.ops.aten.fill_.Scalar


class Pool(Memory):
    """The memory of graphs. ``freed`` are the blocks that the recording has freed since the last operation."""

    def __init__(self) -> None:
        self.freed: list[Tensor] = []
        super().__init__(self.freed.append)
        self._replayed = False

    def before_replay(self) -> None:
        """Poison everything before the first replay: a recording has run nothing."""
        if not self._replayed:
            for segment in self._segments:
                segment.fill_(POISON)
        self._replayed = True


class _Recorder(Recorder):
    """Records with each operation which memory is free before it."""

    _pool: Pool

    def perform(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._pool.collect()
        self.operations += [Operation(_fill, (weak_alias(block), POISON), {}, ()) for block in self._pool.freed]
        self._pool.freed.clear()
        return super().perform(func, args, kwargs)


class DeviceTape(Tape):
    """A graph."""

    recorder = _Recorder

    @contextmanager
    def capture(self, pool: Arena) -> Iterator[None]:
        with super().capture(pool):
            yield
        self._kept.clear()

    def replay(self) -> None:
        assert isinstance(self._pool, Pool)
        self._pool.before_replay()
        super().replay()


class DeviceBackend(TapeBackend):
    """Makes such graphs and pools."""

    def pool(self) -> Pool:
        return Pool()

    def graph(self) -> DeviceTape:
        return DeviceTape(self._generators)


def device_capture(context: BuildContext, **options: Any) -> PartialCapture:
    """``graph-capture=partial`` with such graphs; ``options`` are its options."""
    chosen = PartialOptions.model_validate({"scope": ("attn", "mlp"), **options})
    return PartialCapture(context, chosen, lambda: DeviceBackend(context.rng.streams))
