"""A run of 50 M parameters on 8 ranks, some of which are killed while it trains."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

RANKS = 8
#: 8 x 12 x 640^2 in layers, 16,000 x 640 in the embedding.
MODEL = {
    "model.num_layers": 8,
    "model.hidden_size": 640,
    "model.num_heads": 8,
    "data.vocab_size": 16000,
    "train.sequence_length": 32,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 4,
    "parallel.tensor": 2,
    "parallel.pipeline": 2,
}
QUIET = {
    "run.device": "cpu",
    "run.threads": 1,
    "eval.interval": 0,
    "eval.batches": 1,
    "observer.use": "jsonl",
    "guard.straggler_interval": 0,
    "guard.replica_interval": 0,
}
#: Steps between two saves, on disk or in memory: a few seconds of work.
EVERY = 2
#: Where a run saves every ``EVERY`` steps; and one that saves nothing.
UNSAVED = "nothing"
WAYS: Mapping[str, Mapping[str, Any]] = {
    "memory": {"checkpoint.memory_interval": EVERY, "checkpoint.interval": 0},
    "disk": {"checkpoint.memory_interval": 0, "checkpoint.interval": EVERY},
    "disk, behind the training": {
        "checkpoint.memory_interval": 0, "checkpoint.interval": EVERY, "checkpoint.async_save": True,
    },
}  # fmt: skip


_NOT_SAVED = {"checkpoint.memory_interval": 0, "checkpoint.interval": 0}


class Run:
    """A run in ``folder`` under way, which starts again by itself.

    ``fault`` is injected into it, as ``MEGATRON_RUN_FAULT`` says one. A rank that hangs is lost after ``timeout`` s.
    """

    def __init__(self, folder: Path, way: str, *, fault: str = "", timeout: float = 600.0) -> None:
        self.folder = folder
        values = {**MODEL, **QUIET, **WAYS.get(way, _NOT_SAVED), "train.steps": 100_000, "run.folder": folder}
        values["run.timeout"] = timeout
        words = ["preset:tiny", "--plugin", "schedule=1f1b", "--plugin", "optimizer=zero1", "--nproc", str(RANKS)]
        words += ["--plugin", "parallel-layer=tensor", "--max-restarts", "1000"]
        words += [each for key, value in values.items() for each in ("--set", f"{key}={value}")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_run_cli", *words],
            env={**os.environ, **({"MEGATRON_RUN_FAULT": fault} if fault else {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def rows(self) -> list[dict[str, Any]]:
        """The steps that were done so far, of all attempts, in the order in which they were done."""
        with suppress(FileNotFoundError):
            lines = (self.folder / "metrics.jsonl").read_text("utf-8").splitlines()
            return [row for row in map(json.loads, lines) if "step_time_s" in row]
        return []

    def wait_for(self, condition: Any, patience: float = 300.0) -> None:
        """Return once ``condition()`` holds. Raises RuntimeError where the run ends before, or it takes too long."""
        deadline = time.monotonic() + patience
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = self._process.stderr.read() if self._process.poll() is not None and self._process.stderr else b""
                raise RuntimeError(f"the run ended or stood still: {said.decode(errors='replace')[-2000:]}")
            time.sleep(0.02)

    def strike_one(self, draw: random.Random, number: signal.Signals = signal.SIGKILL) -> tuple[int, float]:
        """Send a signal to a rank that ``draw`` chooses. The number of steps done before, and when, since the epoch."""
        (server,) = (pid for pid in children(self._process.pid) if "fork_server" in command(pid))
        victim = draw.choice([pid for pid in children(server) if alive(pid)])
        done, now = len(self.rows()), time.time()
        os.kill(victim, number)
        return done, now

    def restart(self, attempt: int) -> Mapping[str, Any]:
        """The record of the restart that began ``attempt``; empty until its first step is done."""
        with suppress(FileNotFoundError, ValueError):
            record = json.loads((self.folder / f"logs/attempt-{attempt:03d}/restart.json").read_text("utf-8"))
            return dict(record) if "seconds" in record else {}
        return {}

    def end(self) -> None:
        """Stop the run at once: nothing of it is wanted any more."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


@contextmanager
def running(folder: Path, way: str, *, fault: str = "", timeout: float = 600.0) -> Iterator[Run]:
    """A run that saves ``way``, ended with the block."""
    run = Run(folder, way, fault=fault, timeout=timeout)
    try:
        yield run
    finally:
        run.end()


def children(pid: int) -> list[int]:
    """The processes that ``pid`` has started."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text("ascii").split()
        ]
    return []


def command(pid: int) -> str:
    """The command line of a process."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8").replace("\0", " ")
    return ""


def alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] not in "ZX"
    return False
