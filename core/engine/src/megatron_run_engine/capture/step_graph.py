"""One graph of a whole step: forwards and backwards of all microbatches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from megatron_run.contracts import CaptureSize
from megatron_run_engine.capture.fixed_addresses import FixedAddresses
from megatron_run_engine.capture.graphs import backend_for
from megatron_run_engine.capture.rules import kept_streams, refusing_breaks

if TYPE_CHECKING:
    import torch

    from megatron_run.contracts import Region
    from megatron_run.contracts.schedule import Action
    from megatron_run_engine.capture.graphs import Backend
    from megatron_run_engine.runtime.context import BuildContext


class StepGraph:
    """The graph of ``run``, a step of ``actions`` through ``regions``, recorded in a pool of its own.

    ``read`` is what it reads besides parameters: as long as the graph exists nobody else gets that memory. ``backend``
    is that of the device unless another is given. Raises :class:`megatron_run.errors.GraphCaptureError` if ``run``
    breaks a rule of capture.
    """

    def __init__(
        self,
        run: Callable[[], None],
        regions: Sequence[Region],
        actions: Sequence[Action],
        context: BuildContext,
        *,
        read: Collection[torch.UntypedStorage] = (),
        backend: Backend | None = None,
    ) -> None:
        backend = backend_for(context) if backend is None else backend
        self._graph, self._facts, self._read = backend.graph(), FixedAddresses.of(regions, actions), tuple(read)
        pool = backend.pool()
        with kept_streams(context.rng.streams), refusing_breaks(), self._graph.capture(pool):
            run()
        #: One region, one graph, and the bytes of its pool.
        self.size = CaptureSize(1, 1, 0, pool_bytes=backend.pool_bytes([pool]))

    def replay(self) -> None:
        """Run the recorded step."""
        self._graph.replay()

    def mismatch(self, actions: Sequence[Action]) -> str:
        """The reason why it cannot serve a step of ``actions``, empty if it can."""
        return self._facts.changed(actions)
