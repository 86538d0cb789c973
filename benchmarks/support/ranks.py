"""Measures in fresh processes that talk over gloo, all of them ended when one of them fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_run_engine.training.process import KEEP_FREED

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}
#: Seconds between two looks at the ranks: each look takes microseconds.
PERIOD = 0.05


def on_ranks(
    measurement: Callable[..., Any],
    world: int,
    arguments: Mapping[str, object],
    *,
    threads: int = 1,
    keeping: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """What ``measurement(**arguments)`` returns on rank 0 of ``world`` fresh processes, one process group.

    ``measurement`` is a function of a module; arguments and result pass through JSON. ``threads`` are those of each
    rank; ``keeping``: glibc keeps freed memory, as on the ranks that our launcher starts; ``environment``: what else is
    set there. Raises :class:`SystemExit` as soon as one rank has failed, and ends the others.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "result.json"
        described = {"module": measurement.__module__, "function": measurement.__name__, "arguments": arguments}
        job.write_text(json.dumps({**described, "store": f"{folder}/store", "result": str(result)}), "utf-8")
        settings = {**os.environ, **SETTINGS, **(environment or {}), "WORLD_SIZE": str(world)}
        settings |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        settings |= {"GLIBC_TUNABLES": KEEP_FREED} if keeping else {}
        command = (sys.executable, "-m", "benchmarks.support.rank", str(job))
        ranks = [subprocess.Popen(command, cwd=ROOT, env={**settings, "RANK": str(rank)}) for rank in range(world)]
        try:
            _watch(ranks, measurement.__name__)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return json.loads(result.read_text("utf-8"))


def _watch(ranks: Sequence[subprocess.Popen[bytes]], name: str) -> None:
    """Wait until all ranks are done, or one has failed: the others would sit out their time limit."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
        if failed:
            raise SystemExit(f"{name}: {', '.join(failed)}")
        if None not in codes:
            return
        time.sleep(PERIOD)
