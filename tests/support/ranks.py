"""Runs a function on several gloo ranks of this machine: one thread each, a time limit, no orphans."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: Forks from a process that has torch loaded but never used.
CONTEXT = multiprocessing.get_context("forkserver")
#: ``torch._inductor.config`` is what asking for deterministic kernels imports: seconds, in every rank.
_PRELOADED = [
    "torch.distributed",
    "torch._inductor.config",
    "megatron_run_engine.launch.worker",
    "megatron_run_engine.launch.rank",
]
CONTEXT.set_forkserver_preload(_PRELOADED)


class RankFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 60) -> list[Any]:
    """Call ``function(rank, world, *arguments)`` on ``world`` ranks and return their results by rank.

    ``function`` is importable and its arguments and result can be pickled.
    """
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            CONTEXT.Process(target=_rank, args=(function, rank, world, store, pipes[rank][1], arguments))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect([reader for reader, _ in pipes], time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def start_server() -> None:
    """Start what outlives a test on purpose without the mark by which leftovers are found; it ends with the session."""
    mark = os.environ.pop("TESTED_BY", None)
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    if mark is not None:
        os.environ["TESTED_BY"] = mark


def _collect(readers: list[Connection], deadline: float) -> list[Any]:
    results = []
    for rank, reader in enumerate(readers):
        if not reader.poll(max(0.0, deadline - time.monotonic())):
            raise RankFailed(f"rank {rank} did not finish in time")
        ok, value = reader.recv()
        if not ok:
            raise RankFailed(f"rank {rank}:\n{value}")
        results.append(value)
    return results


def _rank(
    function: Callable[..., Any], rank: int, world: int, store: str, pipe: Connection, arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=30)
        )
        pipe.send((True, function(rank, world, *arguments)))
        dist.barrier()  # nobody leaves while another still talks
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
