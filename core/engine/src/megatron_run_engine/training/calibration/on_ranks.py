"""Runs measurements in fresh processes with the environment of a training's ranks, all ended when one of them fails.

``python -m megatron_run_engine.training.calibration.on_ranks JOB.json`` is one of the processes: it carries out the
job's tasks in order and writes what each returned.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from megatron_run.errors import InputError
from megatron_run_engine.training.process import available_cores, rank_environment

#: Seconds between two looks at the processes.
_PERIOD = 0.05


class Task(NamedTuple):
    """A call ``function(**arguments)`` on every rank; arguments and result pass through JSON."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = {}


def on_ranks(world: int, tasks: Sequence[Task], say: Callable[[str], None] | None = None) -> list[list[Any]]:
    """What each of ``tasks`` returned on each of ``world`` ranks, of one thread each, that share a process group.

    ``say`` gets the number of tasks done whenever it has grown. Raises :class:`InputError` when a rank fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calls = [(each.function.__module__, each.function.__name__, dict(each.arguments)) for each in tasks]
        (folder / "job.json").write_text(json.dumps({"folder": name, "tasks": calls}), encoding="utf-8")
        environment = rank_environment(os.environ, 1, world, available_cores())
        command = (sys.executable, "-m", __name__, str(folder / "job.json"))
        ranks = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank), "WORLD_SIZE": str(world)})
            for rank in range(world)
        ]
        try:
            _watch(ranks, folder, say)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        results = [json.loads((folder / f"result-{rank}").read_text("utf-8")) for rank in range(world)]
    return [list(each) for each in zip(*results, strict=True)]


def _watch(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, say: Callable[[str], None] | None) -> None:
    told = 0
    while True:
        codes = [rank.poll() for rank in ranks]
        if failed := [rank for rank, code in enumerate(codes) if code]:
            raise InputError(f"rank {failed[0]} of a measurement failed", fix="what it printed says why")
        if None not in codes:
            return
        done = len(list(folder.glob("done-*")))
        if say and done > told:
            told = done
            say(str(done))
        time.sleep(_PERIOD)


def _main(file: Path) -> None:
    import torch
    import torch.distributed as dist

    job = json.loads(file.read_text("utf-8"))
    rank, world, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(job["folder"])
    torch.set_num_threads(1)
    found = []
    for index, (module, function, arguments) in enumerate(job["tasks"]):
        # A group of its own for each task: a run makes and leaves its own.
        method = f"file://{folder}/store-{index}"
        dist.init_process_group("gloo", method, rank=rank, world_size=world, timeout=timedelta(minutes=5))
        found.append(getattr(importlib.import_module(module), function)(**arguments))
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:
            (folder / f"done-{index}").touch()
    (folder / f"result-{rank}").write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # what is left is tearing down


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
