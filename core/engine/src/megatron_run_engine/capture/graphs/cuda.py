"""The backend of CUDA devices: CUDA graphs in private pools of the caching allocator."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch


class CudaBackend:
    """Makes CUDA graphs, all recorded on one side stream; kernels may draw from ``generators``.

    The graphs of a pool hold its memory jointly: it is freed with the last of them. What the allocator has kept of
    eager steps goes back to the device first: pools cannot use it, and it would lie beside them.
    """

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator]) -> None:
        self._device, self._generators = device, generators
        self._stream = torch.cuda.Stream(device)
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved(device)

    def pool(self) -> Any:
        """The handle of a private pool."""
        return torch.cuda.graph_pool_handle()

    def graph(self) -> CudaGraph:
        """An empty graph with the generators registered."""
        return CudaGraph(self._device, self._stream, self._generators)

    def pool_bytes(self, pools: Iterable[Any]) -> int | None:
        """Bytes that the allocator has reserved since the backend was made; it does not report them per pool."""
        return max(0, torch.cuda.memory_reserved(self._device) - self._before)


class CudaGraph:
    """One ``torch.cuda.CUDAGraph``."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, generators: Sequence[torch.Generator]) -> None:
        self._device, self._stream = device, stream
        self._graph = torch.cuda.CUDAGraph()
        default = torch.cuda.default_generators[device.index or 0]
        for generator in generators:
            if generator is not default:  # every graph registers the default generator itself
                self._graph.register_generator_state(generator)

    @contextmanager
    def capture(self, pool: Any) -> Iterator[None]:
        """Record on the side stream, without garbage collection: freeing memory may invalidate a capture."""
        collects = gc.isenabled()
        gc.disable()
        torch.cuda.synchronize(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                # Not "global", torch's default: a thread that saves a checkpoint in the background waits for events
                # and pins memory, which would invalidate this capture and raise in that thread.
                self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    self._abandon()
                    raise
                self._graph.capture_end()
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _abandon(self) -> None:
        """End a failed capture. Errors raised here are consequences and must not replace the original one."""
        with suppress(RuntimeError):
            self._graph.capture_end()
        with suppress(RuntimeError):
            self._graph.reset()

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()
