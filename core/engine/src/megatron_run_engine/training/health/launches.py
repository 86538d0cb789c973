"""Finds out whether the device waits for the host, whose launches then bound a step, and says so once.

A step begins with an idle device, since the one before ended with a copy to the host. If the device is done as soon as
the host has launched the last kernel, it has waited for launches all along; else it still has a queue to work off.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    import logging

    from megatron_run.contracts import GraphCapture
    from megatron_run_engine.runtime.context import BuildContext

#: Steps that are not looked at beside those before a capture: kernels load and memory grows in them.
_WARM_UP = 2
#: Steps that are looked at.
_STEPS = 3
#: The device keeps up with the host if, of the time that it takes, at most this share is left after the last launch.
#: Its queue holds a thousand launches, which of a step that the device bounds is a larger share.
_LEFT = 0.03


class Launched(NamedTuple):
    """Seconds from the start of a step until the ``host`` had launched its last kernel, and the ``device`` was done."""

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
    return all(each.device - each.host <= _LEFT * each.device for each in steps)


class LaunchWatch:
    """Looks at a few steps after the first ``skipped`` ones; without a ``stopwatch`` at none."""

    def __init__(self, stopwatch: Stopwatch | None, skipped: int, log: logging.Logger) -> None:
        self._stopwatch, self._skipped, self._log = stopwatch, skipped, log
        self._marks: tuple[object, object] | None = None
        self._host = 0.0
        self._seen: list[Launched] = []

    @contextmanager
    def launching(self, *, timed: bool = False) -> Iterator[None]:
        """The launches of a step lie within. One whose actions are ``timed`` waits for each, and shows nothing."""
        self._skipped -= 1
        if self._stopwatch is None or self._skipped >= 0 or timed:
            yield
            return
        start, begun = self._stopwatch.mark(), time.perf_counter()
        yield
        self._host = time.perf_counter() - begun
        self._marks = start, self._stopwatch.mark()

    def synchronised(self) -> None:
        """Judge the step, which the device has ended; after the last one that is looked at, say what was found."""
        if self._stopwatch is None or self._marks is None:
            return
        self._seen.append(Launched(self._host, self._stopwatch.seconds(*self._marks)))
        self._marks = None
        if len(self._seen) < _STEPS:
            return
        self._stopwatch = None
        if waits_for_host(self._seen):
            longest = max(self._seen, key=lambda each: each.device)
            self._log.warning(
                "the GPU waits for the host: launching the kernels of a step takes %.0f of its %.0f ms; type "
                "--plugin graph-capture=partial,scope=step, which launches them at once, or raise "
                "train.micro_batch_size, which gives each more to do",
                *(1e3 * longest.host, 1e3 * longest.device),
            )


def watch_launches(context: BuildContext, capture: GraphCapture) -> LaunchWatch:
    """The watch of a run: of rank 0 on CUDA, where its host waits for no other rank within a step.

    Steps that are captured whole are one launch.
    """
    sizes = context.topology.sizes
    alone = sizes.world == 1 or (sizes.pipeline == sizes.expert == 1 and context.run.backend != "gloo")
    looks = context.topology.rank == 0 and alone and not capture.whole_step
    stopwatch = stopwatch_of(context.device) if looks else None
    return LaunchWatch(stopwatch, capture.capture_after + _WARM_UP, context.log)
