"""The hub of the watch network: what it costs, and how soon it names a stopped rank among thousands.

    python -m benchmarks.watch_hub [--quick]

The hub in a process of its own, as in the sidecar of rank 0. Another process plays all other sidecars, each of which
reports every half second over a connection of its own, and as many strangers, who connect and say nothing. Then one
rank is stopped while all others wait for it. `--quick` takes 256 of each.
"""

from __future__ import annotations

import base64
import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from pathlib import Path

from benchmarks.support.command import run
from benchmarks.support.report import table
from megatron_run.contracts.activity import Activity
from megatron_run_engine.launch.watchdog.connection import Connection, join_hub
from megatron_run_engine.launch.watchdog.hub import Hub
from megatron_run_engine.launch.watchdog.page import PageWriter

SECRET, INTERVAL = "of this benchmark", 0.5
#: The limit on silence, ``run.timeout``, and the seconds after it within which a stopped rank must be named.
LIMIT, AFTER = 10.0, 2.0
#: Seconds over which the processor is measured.
MEASURED = 16.0


def keep_hub(size: int, pipe: Pipe) -> None:
    """Keep a hub until the pipe ends; answer each word with processor seconds, most memory in MB, ranks, strangers."""
    hub = Hub(size, LIMIT, SECRET, "127.0.0.1")
    hub.start()
    pipe.send(hub.port)
    while True:
        try:
            pipe.recv()
        except EOFError:
            break
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send((used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3, len(hub._connections), len(hub._strangers)))
    hub.finish(10.0)


def page(folder: Path, size: int, *, inside: bool) -> str:
    """The status page of a rank that waits in a collective of all, or computes."""
    activity, path = Activity(), folder / f"page-{inside}"
    activity.members["world"] = tuple(range(size))
    PageWriter(path, activity)
    activity.step(4)
    activity.enter("optimizer" if inside else "backward")
    if inside:
        activity.collective("all-reduce", "world", 2).__enter__()
    return base64.b64encode(path.read_bytes().rstrip(b"\0")).decode()


def play(
    sidecars: list[Connection], seconds: float, stopped: float | None = None, pages: tuple[str, str] = ("", "")
) -> float:
    """Report for ``seconds``, spread over each interval; since ``stopped`` the last rank is. When anybody was told."""
    start, sent = time.monotonic(), 0
    while (now := time.monotonic()) < start + seconds:
        due = int((now - start) / INTERVAL * len(sidecars))
        for number in range(sent, due):
            rank = number % len(sidecars)
            quiet = 0.0 if stopped is None else now - stopped
            held = {"stopped": quiet if rank == len(sidecars) - 1 else 0.0}
            shown = {"page": pages[rank == len(sidecars) - 1]} if stopped is not None and number < len(sidecars) else {}
            sidecars[rank].send(quiet=quiet, **{"stopped": 0.0, **held, **shown})
        sent = due
        if stopped is not None and wait([sidecars[0].fileno()], 0.0):
            return time.monotonic()
        time.sleep(0.01)
    return 0.0


def measure(size: int) -> Iterator[tuple[str, ...]]:
    """The rows for ``size`` ranks and as many strangers."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    context = get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=keep_hub, args=(size, child_end), daemon=True)
    process.start()
    child_end.close()
    port = parent_end.recv()

    def ask() -> tuple[float, float, int, int]:
        parent_end.send("")
        answer: tuple[float, float, int, int] = parent_end.recv()
        return answer

    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(size)]
    begun = time.monotonic()
    sidecars = []
    for rank in range(size):
        sidecars.append(Connection(socket.create_connection(("127.0.0.1", port))))
        assert join_hub(sidecars[-1], rank, SECRET, 30.0)
    joined = time.monotonic() - begun
    before, start = ask(), time.monotonic()
    play(sidecars, MEASURED / 2)
    ranks, left = ask()[2:]  # in the middle: strangers who say nothing are sent away
    play(sidecars, MEASURED / 2)
    share = (ask()[0] - before[0]) / (time.monotonic() - start)
    with tempfile.TemporaryDirectory() as folder:
        pages = (page(Path(folder), size, inside=True), page(Path(folder), size, inside=False))
        stopped = time.monotonic()
        notified = play(sidecars, LIMIT + 30.0, stopped, pages)
    after = ask()
    named = [message["rank"] for message in sidecars[0].receive() if "rank" in message]
    for stranger in strangers:
        stranger.close()
    for sidecar in sidecars:
        sidecar.close()
    parent_end.close()
    process.join()
    yield f"{size} + {size}", "connected, s", f"{joined:.1f}", "", ""
    yield "", "ranks, strangers that are heard", f"{ranks}, {left}", f"{size}", "yes" if ranks == size else "no"
    yield "", "processor of the hub, of one core", f"{share:.0%}", "", ""
    yield "", "memory of the hub, at most, MB", f"{after[1]:.0f}", "", ""
    seconds = notified - stopped if named == [size - 1] else float("nan")
    yield (
        "",
        "stopped rank named, s",
        f"{seconds:.1f}",
        f"at most {LIMIT + AFTER:g}",
        "yes" if seconds <= LIMIT + AFTER else "no",
    )


def report(*, quick: bool) -> Iterator[str]:
    """Measure once."""
    yield f"{os.cpu_count()} cores, run.timeout {LIMIT:g} s."
    yield ""
    yield from table(("ranks + strangers", "what", "measured", "goal", "met"), measure(256 if quick else 4096))


if __name__ == "__main__":
    run("watch_hub", "The hub of the watch network", __doc__, report)
