"""The notice of a run whose device waits for the host: launches bound its steps.

The device is idle when the host has read the numbers of a step, which it waits for; the clocks of both are compared
there. If the device is done with the next backward as soon as the host has launched the last kernel, it has waited for
launches all along; else it still has a queue to work off.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from megatron_run.errors import InputError
from megatron_run_engine.capture import check_step

if TYPE_CHECKING:
    import logging

    from megatron_run.contracts import Chunk, GraphCapture
    from megatron_run_engine.runtime.context import BuildContext

#: Steps that are not looked at beside those before a capture: kernels load and memory grows in them.
_WARM_UP = 2
#: Steps that are looked at.
_STEPS = 3
#: Seconds that a device which waits for launches has left after the last one: its last few kernels, however long the
#: step. Where the host is ahead, what is left is the whole queue, and CUDA's holds about 1,000 launches: they take 5 ms
#: at least, since the device bounds the step and a launch alone takes 5 us.
_LEFT = 2e-3
#: The same as a share of the step, for steps that are too short to fill the queue.
_LEFT_OF_STEP = 0.03


class Launched(NamedTuple):
    """Seconds of the host from the start of a step until it had launched the last kernel, and the ``device`` was done.

    The last kernel is that of the last backward.
    """

    host: float
    device: float


class Stopwatch(Protocol):
    """Marks moments in the work of a device without making the host wait."""

    def mark(self) -> object:
        """Mark the end of what has been launched so far."""
        ...

    def seconds(self, start: object, end: object) -> float:
        """Seconds of the device between two marks, the second of which it has passed."""
        ...


class CudaStopwatch:
    """Events in the current stream of ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: object, end: object) -> float:
        """Seconds between two events."""
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1e3


def stopwatch_of(device: torch.device) -> Stopwatch | None:
    """That of ``device``, None for a CPU, which runs what it launches."""
    return CudaStopwatch(device) if device.type == "cuda" else None


def waits_for_host(steps: Sequence[Launched]) -> bool:
    """Whether in each of ``steps`` the device was done almost as soon as the host had launched the last kernel."""
    return all(each.device - each.host <= min(_LEFT, _LEFT_OF_STEP * each.device) for each in steps)


class LaunchWatch:
    """Looks at a few steps after the first ``skipped`` ones; without a ``stopwatch`` at none.

    ``advice`` is how the device would wait less.
    """

    def __init__(self, stopwatch: Stopwatch | None, skipped: int, advice: str, log: logging.Logger) -> None:
        self._stopwatch, self._skipped, self._advice, self._log = stopwatch, skipped, advice, log
        self._idle: tuple[object, float] | None = None  # a moment by both clocks
        self._begun = 0.0
        self._launched: tuple[object, float] | None = None  # the moment by the host's clock
        self._seen: list[Launched] = []

    @contextmanager
    def launching(self, *, timed: bool = False) -> Iterator[None]:
        """The launches of a step lie within. One whose actions are ``timed`` waits for each, and shows nothing."""
        self._skipped -= 1
        if self._stopwatch is None or self._idle is None or self._skipped >= 0 or timed:
            yield
            return
        self._begun = time.perf_counter()
        yield
        self._launched = self._stopwatch.mark(), time.perf_counter()

    def synchronised(self) -> None:
        """Judge the step whose numbers were just read; after the last one that is looked at, say what was found.

        The device has ended the step's forwards and backwards, and its update is not launched yet.
        """
        if self._stopwatch is None:
            return
        if self._idle is not None and self._launched is not None:
            (idle, at), (end, launched) = self._idle, self._launched
            device = self._stopwatch.seconds(idle, end) - (self._begun - at)
            self._seen.append(Launched(launched - self._begun, device))
        self._launched = None
        if self._skipped <= 0:  # the next step is looked at
            self._idle = self._stopwatch.mark(), time.perf_counter()
        if len(self._seen) < _STEPS:
            return
        self._stopwatch = None
        if waits_for_host(self._seen):
            longest = max(self._seen, key=lambda each: each.device)
            self._log.warning(
                "the GPU waits for the host: launching the kernels of a step takes %.0f of its %.0f ms; %s",
                *(1e3 * longest.host, 1e3 * longest.device, self._advice),
            )


def advise(context: BuildContext, chunks: Sequence[Chunk], capturing: str) -> str:
    """The advice where launches bound a step; where steps of ``chunks`` cannot be captured whole, also why.

    ``capturing`` is the graph capture to choose.
    """
    larger = "raise train.micro_batch_size, which gives each more to do"
    try:
        check_step(context.topology.sizes.pipeline, context.train.offload, [chunk.segments() for chunk in chunks])
    except InputError as refusal:
        return f"{larger} (one graph of each step is refused: {refusal})"
    return f"type --plugin {capturing},scope=step, which launches them at once, or {larger}"


def watch_launches(context: BuildContext, capture: GraphCapture, chunks: Sequence[Chunk], chosen: str) -> LaunchWatch:
    """The watch of a run with ``capture``, ``chosen`` by that name.

    Rank 0 on CUDA looks where its host waits for no other rank within a step; one that is captured whole is one launch.
    """
    sizes = context.topology.sizes
    alone = sizes.world == 1 or (sizes.pipeline == sizes.expert == 1 and context.run.backend != "gloo")
    looks = context.topology.rank == 0 and alone and not capture.whole_step
    stopwatch = stopwatch_of(context.device) if looks else None
    capturing = chosen if capture.captures_steps else "graph-capture=partial"
    return LaunchWatch(stopwatch, capture.capture_after + _WARM_UP, advise(context, chunks, capturing), context.log)
