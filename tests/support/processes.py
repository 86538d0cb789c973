"""Looking after the processes that a test starts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def alive(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def process_ids(folder: Path) -> list[int]:
    """The process ids that stand-in ranks have left in ``folder``."""
    return [int(text) for file in folder.glob("*.pid") if (text := file.read_text())]


def kill_when_begun(program: str, pids: Path, count: int) -> None:
    """Run ``program`` until ``count`` processes have left their ids in ``pids``, and kill it: none lives on for 5 s."""
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_until(lambda: len(process_ids(pids)) == count)
        assert all(alive(each) for each in process_ids(pids))
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not any(alive(each) for each in process_ids(pids)), seconds=5)


@contextmanager
def on_signals(action: signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    """Within: what this process and those that it starts do on ``numbers``. Outside, ``nohup`` may ignore SIGHUP."""
    before = {number: signal.signal(number, action) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
