"""The end of a run whose machine is about to be taken: by a file that asks for it, and within a time.

A thread looks for both, since the main one may wait in C. What still fits is :class:`StopRequest`'s to judge.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from time import monotonic, time_ns

from megatron_run.errors import ExitCode
from megatron_run_engine.launch.failures import last_saved
from megatron_run_engine.runtime.world import StopRequest

#: Seconds between two looks at the time that is left, and at the file.
_LOOK, _LOOK_FOR_FILE = 0.1, 1.0
#: Seconds that a start may have taken until somebody looks: a younger file is for this run.
_STARTING = 120.0

#: Ends this process at once with a code and a line.
Leave = Callable[[ExitCode, str], object]


@contextmanager
def preempted(
    stop: StopRequest, notice: Path | None, folder: Path, leave: Leave, tell: Callable[[str], object]
) -> Iterator[None]:
    """Within: ``stop`` is requested once the file ``notice`` appears, and this process ends in time.

    It leaves as soon as the step under way and a save cannot end within ``run.stop_within``, and when that is over
    however far they are: the newest step saved in ``folder`` stays. ``tell`` gets the line of a notice.
    """
    if notice is None and stop.within == inf:
        yield
        return
    over = threading.Event()
    watch = _Watch(stop, notice and notice.expanduser(), folder, leave, tell)
    thread = threading.Thread(target=watch.run, args=(over,), name="preemption", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Watch:
    """The thread's work."""

    def __init__(
        self, stop: StopRequest, notice: Path | None, folder: Path, leave: Leave, tell: Callable[[str], object]
    ) -> None:
        self._stop, self._notice, self._folder, self._leave, self._tell = stop, notice, folder, leave, tell
        there = self._written()  # one that has been there since before the start is of an earlier notice
        self._before = there if there is not None and there < time_ns() - _STARTING * 1e9 else None
        self._looked = monotonic()

    def run(self, over: threading.Event) -> None:
        while not over.wait(_LOOK):
            self._look_for_notice()
            code = self._stop.requested
            if code is None or self._stop.left == inf:
                continue
            if self._stop.left <= 0:
                self._end(code, f"run.stop_within={self._stop.within:g} s is over in step {self._stop.step}")
            elif not self._stop.step_fits:
                left = f"{self._stop.left:.1f} s are too short for the rest of a step and a save"
                self._end(code, f"{left}: step {self._stop.step} is left undone")
            else:
                continue
            return

    def _look_for_notice(self) -> None:
        if self._notice is None or self._stop.requested is not None or monotonic() - self._looked < _LOOK_FOR_FILE:
            return
        self._looked = monotonic()
        if self._written() not in (None, self._before):
            self._stop.stop(ExitCode.SIGTERM, notice=f"{self._notice} (run.stop_file)")
            with suppress(OSError):  # whoever read the output may be gone first
                self._tell(f"{self._notice} is there: the run stops as after SIGTERM")

    def _written(self) -> int | None:
        """When the notice was written, in nanoseconds; None where there is none."""
        with suppress(OSError):
            return self._notice.stat().st_mtime_ns if self._notice is not None else None
        return None

    def _end(self, code: ExitCode, what: str) -> None:
        step = last_saved(self._folder)
        kept = "no step is saved" if step is None else f"step {step} is saved"
        self._leave(code, f"stopped by {self._stop.stopped_by(code)}: {what}; {kept}")
