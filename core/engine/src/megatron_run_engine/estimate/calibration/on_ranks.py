"""Runs measurements in fresh processes with the environment of a training's ranks, all ended when one of them fails.

A start takes each rank seconds, so it is one for all tasks, also for those of fewer ranks, during which the others
sleep. ``python -m megatron_run_engine.estimate.calibration.on_ranks JOB.json`` is one of the processes: it carries out
the job's tasks in order and writes what each returned.
"""

from __future__ import annotations

import gc
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
from megatron_run_engine.host.rank_environment import available_cores, rank_environment

#: Seconds between two looks at the processes, and at whether a task of other ranks is done.
_PERIOD = 0.05


class RankCall(NamedTuple):
    """A call ``function(**arguments)`` on each of the first ``ranks``; arguments and result pass through JSON."""

    ranks: int
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = {}


def on_ranks(tasks: Sequence[RankCall], begun: Callable[[int], None] = lambda _: None) -> list[list[Any]]:
    """The results of each of ``tasks`` on each of its ranks, of one thread each, that share a process group.

    ``begun`` gets the index of each task that begins. Raises :class:`InputError` when a rank fails.
    """
    world = max(each.ranks for each in tasks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calls = [(each.ranks, each.function.__module__, each.function.__name__, dict(each.arguments)) for each in tasks]
        job = {"folder": name, "parent": os.getpid(), "tasks": calls}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        environment = rank_environment(os.environ, 1, world, available_cores())
        command = (sys.executable, "-m", __name__, str(folder / "job.json"))
        ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}) for rank in range(world)]
        try:
            _watch(ranks, folder, len(tasks), begun)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        results = [iter(json.loads((folder / f"result-{rank}").read_text("utf-8"))) for rank in range(world)]
    return [[next(result) for result in results[: each.ranks]] for each in tasks]


def _watch(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, tasks: int, begun: Callable[[int], None]) -> None:
    index = 0
    begun(index)
    while True:
        codes = [rank.poll() for rank in ranks]
        if failed := [rank for rank, code in enumerate(codes) if code]:
            raise InputError(f"rank {failed[0]} of a measurement failed", fix="what it printed says why")
        while index + 1 < tasks and _done(folder, index).exists():
            index += 1
            begun(index)
        if None not in codes:
            return
        time.sleep(_PERIOD)


def _done(folder: Path, index: int) -> Path:
    """The file that says that a task is done."""
    return folder / f"done-{index}"


def _main(file: Path) -> None:
    import torch
    import torch.distributed as dist

    job = json.loads(file.read_text("utf-8"))
    rank, folder = int(os.environ["RANK"]), Path(job["folder"])
    torch.set_num_threads(1)
    # Imports come first, while all ranks are busy with them.
    functions = [getattr(importlib.import_module(module), name) for _, module, name, _ in job["tasks"]]
    found = []
    for index, (function, (world, _, _, arguments)) in enumerate(zip(functions, job["tasks"], strict=True)):
        if rank >= world:
            while not _done(folder, index).exists():
                if os.getppid() != job["parent"]:  # the parent was killed, and can end nobody
                    os._exit(1)
                time.sleep(_PERIOD)
            continue
        os.environ["WORLD_SIZE"] = str(world)
        # A group of its own for each task: a run makes and leaves its own.
        method = f"file://{folder}/store-{index}"
        dist.init_process_group("gloo", method, rank=rank, world_size=world, timeout=timedelta(minutes=5))
        found.append(function(**arguments))
        gc.collect()  # a training is full of cycles: their groups' threads, files and tensors would slow what follows
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:
            _done(folder, index).touch()
    (folder / f"result-{rank}").write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # what is left is tearing down


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
