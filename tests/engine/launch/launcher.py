"""The local launcher in this process, with stand-ins for its ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_run_engine.launch.job import Job, RunResult
from megatron_run_engine.launch.local import run_local
from megatron_run_engine.run_folder import RunFolder
from tests.support.processes import alive, process_ids, wait_until

STAND_IN = Path(__file__).with_name("stand_in_rank.py")


class Launcher:
    """Runs the launcher in this process and remembers what it showed and told."""

    def __init__(self, folder: Path) -> None:
        self.pids = folder / "pids"
        self.pids.mkdir()
        self.folder = RunFolder(folder / "run", 1)
        self.folder.logs.mkdir(parents=True)
        self.shown: list[bytes] = []
        self.told: list[str] = []

    def __call__(self, *behaviours: str, size: int = 2, grace: float = 1.0, **changes: Any) -> RunResult:
        program = sys.executable, str(STAND_IN), str(self.pids), *behaviours
        show, environment = changes.pop("show", self.shown.append), changes.pop("environment", os.environ)
        servers = changes.pop("servers", None)
        job = Job("", self.folder.path, self.folder.attempt, size, **changes)
        asked = {"servers": servers, "program": program, "environment": environment, "grace": grace}
        return run_local(job, self.told.append, show, **asked)

    def ready(self, ranks: int = 2) -> bool:
        return len(list(self.pids.glob("*.ready"))) == ranks

    def log(self, rank: int) -> str:
        return self.folder.log(rank).read_text()


def no_process_left(launcher: Launcher) -> bool:
    return not any(alive(process) for process in process_ids(launcher.pids))


def send_when(condition: Callable[[], bool], *numbers: signal.Signals) -> threading.Thread:
    """Send signals to this process, half a second apart, once ``condition`` holds."""

    def send() -> None:
        wait_until(condition)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    thread = threading.Thread(target=send)
    thread.start()
    return thread
