"""Measures in fresh processes that talk over gloo, all of them ended when one of them fails."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megatron_run_engine.host.rank_environment import KEEP_FREED

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}
#: Seconds between two looks at the ranks: each look takes microseconds.
PERIOD = 0.05


def on_ranks(measurement: Callable[..., Any], world: int, arguments: Mapping[str, object], **more: Any) -> Any:
    """The result of ``measurement(**arguments)`` on rank 0; ``more`` as :func:`results_of_ranks` takes it."""
    (result,) = results_of_ranks(measurement, world, arguments, **more)
    return result


def results_of_ranks(
    measurement: Callable[..., Any],
    world: int,
    arguments: Mapping[str, object],
    *,
    threads: int = 1,
    keeping: bool = False,
    environment: Mapping[str, str] | None = None,
    backend: str = "gloo",
    patience: float = math.inf,
) -> Iterator[Any]:
    """The results of ``measurement(**arguments)`` on rank 0 of ``world`` fresh processes, one process group.

    A function has one, a generator function those that it yields, each as soon as it is there. ``measurement`` is a
    function of a module; arguments and results pass through JSON. ``threads`` are those of each rank; ``keeping``:
    glibc keeps freed memory, as on ranks of our launcher; ``environment``: what else is set there; ``backend``: that of
    the process group. Raises :class:`SystemExit` as soon as one rank has failed, or no result has come for ``patience``
    seconds since the ranks met, and ends the others.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, results = Path(folder) / "job.json", Path(folder) / "results.jsonl"
        described = {"module": measurement.__module__, "function": measurement.__name__, "arguments": arguments}
        meeting = {"backend": backend, "store": f"{folder}/store"}
        job.write_text(json.dumps({**described, **meeting, "results": str(results)}), "utf-8")
        results.touch()
        settings = {**os.environ, **SETTINGS, **(environment or {}), "WORLD_SIZE": str(world)}
        settings |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        settings |= {"GLIBC_TUNABLES": KEEP_FREED} if keeping else {}
        command = (sys.executable, "-m", "benchmarks.support.rank", str(job))
        ranks = [subprocess.Popen(command, cwd=ROOT, env={**settings, "RANK": str(rank)}) for rank in range(world)]
        try:
            with results.open(encoding="utf-8") as lines:
                yield from _results(ranks, lines, measurement.__name__, patience)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def _results(ranks: Sequence[subprocess.Popen[bytes]], lines: TextIO, name: str, patience: float) -> Iterator[Any]:
    """The results in ``lines`` until all ranks are done, or one has failed: the others would sit out their limit.

    An empty line says that the ranks have met.
    """
    heard, read = math.inf, 0
    while True:
        codes = [rank.poll() for rank in ranks]  # before the lines are read: what was written before the end is seen
        while (line := lines.readline()).endswith("\n"):
            heard, read = time.monotonic(), lines.tell()
            if line.strip():
                yield json.loads(line)
        lines.seek(read)  # the rest of a line may be on its way
        failed = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
        if failed:
            raise SystemExit(f"{name}: {', '.join(failed)}")
        if None not in codes:
            return
        if time.monotonic() - heard > patience:
            raise SystemExit(f"{name}: no result in {patience:.0f} s")
        time.sleep(PERIOD)
