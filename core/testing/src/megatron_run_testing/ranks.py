"""Starts ranks of its own for a conformance suite: gloo on this machine, one thread each, a time limit, no orphans."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megatron_run_testing.check import CheckFailed

#: What every rank needs, loaded once in the process that they are forked from.
_PRELOADED = ["torch.distributed", "megatron_run_testing.parallel_layer", "megatron_run_testing.optimizer"]
#: Seconds that the others are given to come as far as the rank that failed.
_GRACE = 10.0
#: Seconds in which a rank that has died is noticed after a peer that complains of it.
_MOMENT = 0.5

#: What is read from a rank, and in which order when several have something to say: who died is why another raised.
_ORDER = ("item", "done", "died", "raised")

#: An importable generator function: called as ``work(rank, world, *arguments)``, it yields what the rank finds.
Work = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class Progress:
    """What every rank has yielded, in order, and what ended them early; empty when all came to the end."""

    yielded: tuple[list[Any], ...]
    failure: str = ""

    @property
    def common(self) -> int:
        """How many items every rank has yielded."""
        return min(map(len, self.yielded))


def run_on_ranks(work: Work, world: int, *arguments: object, timeout: float = 60.0) -> Progress:
    """Run ``work`` on ``world`` ranks that can talk to each other, and collect what they yield.

    ``work``, its arguments and what it yields cross processes: functions and classes must be importable. The first
    rank that raises, dies or is not done after ``timeout`` seconds ends all.
    """
    context = multiprocessing.get_context("forkserver")  # forks from a process that has torch loaded, but never used
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        job = (work, world, str(Path(folder) / "store"), timeout, sys.dont_write_bytecode, arguments)
        ranks = [context.Process(target=_rank, args=(rank, pipes[rank][1], *job), daemon=True) for rank in range(world)]
        try:
            for process, (_, writer) in zip(ranks, pipes, strict=True):
                process.start()
                writer.close()  # the rank has its own: when that one is closed, it ended
            return _collect([reader for reader, _ in pipes], timeout)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _collect(readers: list[Connection], timeout: float) -> Progress:
    """Read from all ranks until they end, or one has failed and the others came as far as it did."""
    yielded: tuple[list[Any], ...] = tuple([] for _ in readers)
    open_ranks = {reader: rank for rank, reader in enumerate(readers)}
    failure, reached, deadline = "", 0, time.monotonic() + timeout
    while open_ranks and not (failure and min(len(yielded[rank]) for rank in open_ranks.values()) >= reached):
        ready = wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(f"rank {rank}" for rank in open_ranks.values())
            return Progress(yielded, failure or f"{late} did not finish within {timeout:g} s")
        messages = [(*_receive(reader), reader) for reader in ready if isinstance(reader, Connection)]
        for kind, value, reader in sorted(messages, key=lambda message: _ORDER.index(message[0])):
            rank = open_ranks[reader]
            if kind == "item":
                yielded[rank].append(value)
                continue
            del open_ranks[reader]
            if kind != "done" and not failure:
                failure, reached = f"rank {rank}: {value}", len(yielded[rank])
                deadline = min(deadline, time.monotonic() + _GRACE)
    return Progress(yielded, failure and (_death(open_ranks) or failure))


def _death(open_ranks: dict[Connection, int]) -> str:
    """Who has died, or does so within a moment: that is why another rank raised, and may be heard of after it."""
    deadline = time.monotonic() + _MOMENT
    while ready := wait(list(open_ranks), max(0.0, deadline - time.monotonic())):
        for reader in ready:
            assert isinstance(reader, Connection)  # nothing else is waited for
            kind, value = _receive(reader)
            if kind == "died":
                return f"rank {open_ranks[reader]}: {value}"
            if kind != "item":
                del open_ranks[reader]
    return ""


def _receive(reader: Connection) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = reader.recv()
    except (EOFError, OSError):
        return "died", "the process ended without a word"
    return message


def _rank(  # the target of a process takes what travels there, one by one
    rank: int,
    pipe: Connection,
    work: Work,
    world: int,
    store: str,
    timeout: float,
    dont_write_bytecode: bool,  # as it is here
    arguments: tuple[Any, ...],
) -> None:
    """One rank, from its birth to its end. It ends with the process that started it, too."""
    import torch
    import torch.distributed as dist

    sys.dont_write_bytecode = dont_write_bytecode
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
        )
        for item in work(rank, world, *arguments):
            pipe.send(("item", item))
        dist.barrier()  # nobody leaves while another still talks
        dist.destroy_process_group()
        pipe.send(("done", None))
    except BaseException as cause:
        where = traceback.extract_tb(cause.__traceback__)[-1]
        kind = "" if isinstance(cause, CheckFailed) else f"{type(cause).__name__}: "
        pipe.send(("raised", f"{kind}{cause} ({Path(where.filename).name}, line {where.lineno})"))
    # To be ended: peers may still talk to a rank that raised, and tensors on their way are shared with their sender.
    threading.Event().wait()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
