"""Ranks for a conformance suite: processes on this machine with gloo, one thread each, a time limit, no orphans.

A set of ranks is started once per size, for all jobs of a suite (:class:`Rehearsal`).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from megatron_run.registry.discover import Entry
from megatron_run.registry.load import load
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_testing import CheckFailed

#: Modules of every rank, loaded once in the process from which they are forked.
_PRELOADED = [
    "torch.distributed",
    "torch._dynamo",  # which the first optimizer that is made imports: seconds
    "megatron_run_testing.parallel_layer",
    "megatron_run_testing.optimizer",
]
#: Seconds for the other ranks to reach the item at which one failed.
_GRACE = 10.0
#: Seconds to wait for news of a dead rank after one of its peers has raised.
_MOMENT = 0.5

#: Kinds of message from a rank, in the order of handling: a death is the cause of a peer's exception, so it is first.
_ORDER = ("item", "done", "died", "raised")

#: An importable generator function: ``work(rank, world, *arguments)`` yields the rank's results.
Work = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class Progress:
    """The items that every rank has yielded, in order; ``failure`` is why they ended early, or empty."""

    yielded: tuple[list[Any], ...]
    failure: str = ""

    @property
    def common(self) -> int:
        """Number of items that all ranks have yielded."""
        return min(map(len, self.yielded))


def run_on_ranks(work: Work, world: int, *arguments: object, timeout: float = 60.0) -> Progress:
    """Run ``work`` on ``world`` ranks of one process group, and collect the items that they yield.

    ``work``, its arguments and its items are sent between processes by value, so functions and classes must be
    importable. The first rank that raises, dies or is not done after ``timeout`` seconds ends all ranks.
    """
    # The fork server has imported torch but started no threads, so forking it is safe and fast.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    job = world, timeout, sys.dont_write_bytecode, by_value((work, arguments))
    with ExitStack() as cleanup:
        store = Path(cleanup.enter_context(tempfile.TemporaryDirectory()), "store")
        readers = []
        for rank in range(world):
            reader, writer = context.Pipe(duplex=False)
            readers.append(cleanup.enter_context(reader))
            with writer:  # only the rank's copy stays open, so that its end is seen as the end of the pipe
                process = context.Process(target=_rank, args=(rank, writer, str(store), *job), daemon=True)
                process.start()
            cleanup.callback(end_process, process)
        return _collect(readers, timeout)


def by_value(message: object) -> bytes:
    """``message`` as ``Connection.recv`` reads it, to be sent with ``send_bytes``.

    ``Connection.send`` would share the memory of each tensor, which costs the reader a file descriptor for each, open
    as long as the tensor lives.
    """
    return pickle.dumps(message)


def end_process(process: BaseProcess) -> None:
    """Kill ``process``, which was started, and release what this process holds of it."""
    process.kill()
    process.join()
    process.close()


def _collect(readers: list[Connection], timeout: float) -> Progress:
    """Read from all ranks until they end, or one has failed and the others have yielded as many items."""
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
    """The message of a rank that is dead, or dies within a moment; news of a death may follow a peer's exception."""
    deadline = time.monotonic() + _MOMENT
    while ready := wait(list(open_ranks), max(0.0, deadline - time.monotonic())):
        for reader in ready:
            assert isinstance(reader, Connection)  # wait() may also return sockets, of which there are none
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


def _rank(
    rank: int,
    pipe: Connection,
    store: str,
    world: int,
    timeout: float,
    dont_write_bytecode: bool,  # of the parent process
    job: bytes,
) -> None:
    """One rank's process. It also ends when the process that started it ends."""
    import torch
    import torch.distributed as dist

    sys.dont_write_bytecode = dont_write_bytecode
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
        )
        work, arguments = pickle.loads(job)
        for item in work(rank, world, *arguments):
            pipe.send_bytes(by_value(("item", item)))
        dist.barrier()  # no rank closes its connections while another still communicates
        dist.destroy_process_group()
        pipe.send(("done", None))
    except BaseException as cause:
        where = traceback.extract_tb(cause.__traceback__)[-1]
        kind = "" if isinstance(cause, CheckFailed) else f"{type(cause).__name__}: "
        pipe.send(("raised", f"{kind}{cause} ({Path(where.filename).name}, line {where.lineno})"))
    # Wait to be killed: peers may still communicate with a rank that raised.
    threading.Event().wait()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


Job = TypeVar("Job", bound=Hashable)


class SendablePlugin:
    """The plugin ``entry`` with ``options``; it can be sent to another process, which loads the plugin again."""

    def __init__(self, entry: Entry, options: Mapping[str, Any]) -> None:
        self.entry, self.options = entry, options

    def __reduce__(self) -> tuple[type[Self], tuple[Entry, Mapping[str, Any]]]:
        return type(self), (self.entry, self.options)  # a loaded plugin cannot be pickled

    @cached_property
    def plugin(self) -> Plugin:
        """The loaded plugin."""
        plugin = load(self.entry, "plugins check")
        return plugin.with_options(plugin.options_model.model_validate(self.options))


@dataclass
class Rehearsal(Generic[Job]):
    """Runs ``work(rank, world, *arguments, jobs)``, which yields one item per job, and keeps the results of all ranks.

    ``timeout`` is in seconds, for all jobs with one number of ranks. The first argument is the suite's subject;
    ``sendable`` names a class of subjects that can be sent to other processes.
    """

    work: Work
    arguments: tuple[Any, ...]
    jobs: Sequence[Job]
    timeout: float
    sendable: str
    #: By number of ranks and job: the ranks' items, or the failure of the job.
    _seen: dict[int, dict[Job, list[Any] | str]] = field(default_factory=dict)

    def found(self, world: int, job: Job, where: str) -> list[Any]:
        """The results of ``job`` on each of ``world`` ranks. Raises :class:`CheckFailed`, which states ``where``."""
        seen = self._seen.setdefault(world, {})
        if job not in seen:
            self._start(world, job)
        items = seen[job]
        if isinstance(items, str):
            raise CheckFailed(f"{where}: {items}")
        return items

    def _start(self, world: int, first: Job) -> None:
        """Run ``first`` and all later jobs on a new set of ranks, until one fails."""
        jobs = self.jobs[self.jobs.index(first) :]
        progress = self._run(world, jobs)
        for index, job in enumerate(jobs[: progress.common]):
            self._seen[world][job] = [items[index] for items in progress.yielded]
        if progress.common < len(jobs):
            self._seen[world][jobs[progress.common]] = progress.failure

    def _run(self, world: int, jobs: Sequence[Job]) -> Progress:
        try:
            return run_on_ranks(self.work, world, *self.arguments, jobs, timeout=self.timeout)
        except (AttributeError, TypeError, pickle.PicklingError) as cause:  # of a function that is not importable
            raise CheckFailed(
                f"{self.arguments[0]!r} cannot be sent to another rank ({cause}): "
                f"give a module's function, or {self.sendable}"
            ) from cause
