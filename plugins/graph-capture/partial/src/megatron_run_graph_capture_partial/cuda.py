"""The backend of CUDA devices: CUDA graphs, with one private pool of the caching allocator where one is asked for."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch


class CudaBackend:
    """Makes CUDA graphs, all recorded on one side stream; ``generators`` are those from which kernels may draw.

    A pool's graphs hold its memory together: it is free again when the last of them is gone.
    """

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator]) -> None:
        self._device, self._generators = device, generators
        self._stream = torch.cuda.Stream(device)
        self._before = torch.cuda.memory_reserved(device)

    def pool(self) -> Any:
        """The handle of a private pool."""
        return torch.cuda.graph_pool_handle()

    def graph(self) -> CudaGraph:
        """An empty graph that knows the generators."""
        return CudaGraph(self._device, self._stream, self._generators)

    def pool_bytes(self, pools: Iterable[Any]) -> int | None:
        """What the allocator has reserved since the backend was made: it does not say for which pool."""
        return max(0, torch.cuda.memory_reserved(self._device) - self._before)


class CudaGraph:
    """One ``torch.cuda.CUDAGraph``."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, generators: Sequence[torch.Generator]) -> None:
        self._device, self._stream = device, stream
        self._graph = torch.cuda.CUDAGraph()
        default = torch.cuda.default_generators[device.index or 0]
        for generator in generators:
            if generator is not default:  # that one is known to every graph
                self._graph.register_generator_state(generator)

    @contextmanager
    def capture(self, pool: Any) -> Iterator[None]:
        """Record on the side stream; the garbage collector rests, since freeing what it finds may end a capture."""
        collects = gc.isenabled()
        gc.disable()
        torch.cuda.synchronize(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                # Not "global", torch's default: a thread that saves a checkpoint meanwhile waits for events and pins
                # memory, which would end this capture and fail there, though it is no part of it.
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
        """End a capture that went wrong. What else goes wrong then comes of it, and must not take its place."""
        with suppress(RuntimeError):
            self._graph.capture_end()
        with suppress(RuntimeError):
            self._graph.reset()

    def replay(self) -> None:
        """Launch everything at once on the current stream."""
        self._graph.replay()
