"""What a stage computed, as its chunks, autograd and its gradient ledger saw it: the executor is not asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from megatron_run.contracts import ChunkOut
from megatron_run.contracts.schedule import Action, Op
from megatron_run_engine.runtime.gradients import GradientAccumulator


class Witness:
    """Writes ``actions`` down as they are computed. A chunk's call is F, its second of a microbatch R.

    The start of a chunk's backward is B, or I where its weight gradients are put off, and finishing those is W. Nothing
    shows an S, which computes nothing.
    """

    def __init__(self, chunks: Sequence[Any], gradients: GradientAccumulator) -> None:
        self.actions: list[Action] = []
        self._split = False
        self._defer, self._finish = gradients.deferring, gradients.run_deferred
        ledger = cast("Any", gradients)
        ledger.deferring, ledger.run_deferred = self._deferring, self._run_deferred
        for index, chunk in enumerate(chunks):
            chunk.register_forward_hook(partial(self._called, index))

    @contextmanager
    def _deferring(self, key: tuple[int, int]) -> Iterator[None]:
        self._split = True
        with self._defer(key):
            yield
        self._split = False

    def _run_deferred(self, key: tuple[int, int]) -> None:
        self._finish(key)
        self.actions.append(Action("W", *key))

    def _called(self, chunk: int, module: Any, arguments: tuple[Any, ...], out: ChunkOut) -> None:
        microbatch = arguments[1].index
        again = Action("F", microbatch, chunk) in self.actions
        self.actions.append(Action("R" if again else "F", microbatch, chunk))
        roots = [out.x] if out.x is not None else [total for total, _ in out.losses.values()]
        for root in roots[:1]:
            if torch.is_grad_enabled() and root.requires_grad:
                root.register_hook(lambda _: self._back(microbatch, chunk))

    def _back(self, microbatch: int, chunk: int) -> None:
        op: Op = "I" if self._split else "B"
        self.actions.append(Action(op, microbatch, chunk))
