"""A rank without torch: ``stand_in_rank.py PIDS BEHAVIOUR... JOB``, where BEHAVIOUR is ``RANK:WHAT`` or ``*:WHAT``.

Writes its process id into the folder PIDS, then does what its rank is told. The engine is imported only by those who
need it, and then without the package that starts ranks: imports are nine tenths of the time of a rank that only waits.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import FrameType

RANK = int(os.environ.get("RANK", "0"))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # as a rank does


def without_launcher() -> None:
    """Let single modules of the launcher be imported without what its package imports, where it is not there yet."""
    name = "megatron_run_engine.launch"
    if name not in sys.modules:
        found = find_spec(name)
        assert found is not None
        sys.modules[name] = module_from_spec(found)  # not executed


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def leave(code: str) -> None:
    say(f"rank {RANK} prints")
    os._exit(int(code))


def report(job: Path, rest: str) -> None:
    """``CODE first|second MESSAGE``: the second one complains at once, the first cause a little later."""
    from megatron_run_engine.launch.job import RankResult

    code, turn, message = rest.split(" ", 2)
    time.sleep(0.3 if turn == "first" else 0.0)
    RankResult(RANK, int(code), message, secondary=turn != "first").write(job)
    os._exit(int(code))


def fail(text: str) -> None:
    raise ValueError(text)


def kill(folder: Path, after: str) -> None:
    """Be killed, once the file ``after`` is there where one is named."""
    while not Path(folder, after).exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def talk() -> None:
    for count in range(20):
        say(f"line {count}")
        time.sleep(0.02)
    os._exit(0)


def show(names: str) -> None:
    say(repr({name: os.environ.get(name) for name in names.split(",")}))
    os._exit(0)


def describe() -> None:
    """All that a process has from the one that started it, but its own numbers."""
    handled = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE)
    files = {each: str(Path(f"/proc/self/fd/{each}").readlink()) for each in range(3)}
    say(
        repr(
            {
                "environment": dict(os.environ),
                "leads": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
                "signals": [str(signal.getsignal(number)) for number in handled],
                "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
                "files": files,
                "argument": sys.argv[-1],
                "folder": str(Path.cwd()),
                "path": sys.path[1:],
                "collects": (gc.isenabled(), gc.get_threshold()),
            }
        )
    )
    os._exit(0)


def chance() -> None:
    """Numbers of the generators that nobody seeds."""
    import numpy

    say(f"{random.random()} {numpy.random.random()}")
    os._exit(0)


def warn() -> None:
    say("UserWarning: something is odd")
    os._exit(0)


def on_signals(action: signal.Handlers | None, seconds: str = "") -> None:
    """Ignore the signals, or obey them after so many seconds."""
    for number, code in ((signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 75)):
        signal.signal(number, action or partial(obey, code, float(seconds or 0)))


def obey(code: int, seconds: float, number: int, frame: FrameType | None) -> None:
    time.sleep(seconds)
    say("the step is done")
    os._exit(code)


def have_a_child(folder: Path, code: str) -> None:
    """Start a process that outlives this one, which ends with ``code`` where one is given."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / f"{RANK}.child.pid").write_text(str(child.pid))
    if code:
        os._exit(int(code))


def keep_page(folder: Path, job: Path, rest: str) -> None:
    """``slow`` for three seconds, ``wait`` in a collective, ``stop`` by a signal, ``kill``, ``hang`` or ``desert``.

    With ``after`` before it, once rank 0 waits.
    """
    from megatron_run.contracts.activity import Activity
    from megatron_run_engine.launch.job import RankResult
    from megatron_run_engine.launch.watchdog.page import PageWriter

    activity = Activity()
    activity.members["world"] = (0, 1)
    PageWriter(job.with_name(f"page-{RANK}"), activity)  # job.page_path
    activity.step(3)
    activity.enter("optimizer")
    if rest == "wait":
        activity.collective("all-reduce", "world", 8).__enter__()
        Path(folder, f"{RANK}.waits").touch()
    else:
        activity.enter("backward", "B0.0")
    if rest.startswith("after "):
        rest = rest.removeprefix("after ")
        while not Path(folder, "0.waits").exists():
            activity.enter("backward", "B0.0")
            time.sleep(0.02)
    if rest in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if rest == "stop" else signal.SIGKILL)
    if rest == "slow":
        for count in range(60):
            activity.enter("forward", f"F{count}.0")
            time.sleep(0.05)
        RankResult(RANK, 0).write(job)
    if rest in ("slow", "desert"):
        os._exit(0)


def hold_lifeline(job: Path) -> None:
    """End with the launcher, as a rank does."""
    from megatron_run_engine.launch.job import Job
    from megatron_run_engine.launch.rank import hold_lifeline

    hold_lifeline(Job.read(job).lifeline)


def main() -> None:
    folder, *told, job = sys.argv[1:]
    behaviours = dict(each.split(":", 1) for each in told)
    without_launcher()
    word, _, rest = behaviours.get(str(RANK), behaviours.get("*", "exit 0")).partition(" ")
    if (word, rest) == ("parent", ""):  # of ranks whose launcher a test kills, only these can run the thread
        hold_lifeline(Path(job))
    Path(folder, f"{RANK}.pid").write_text(str(os.getpid()))
    actions: dict[str, Callable[[], object]] = {
        "exit": lambda: leave(rest),
        "report": lambda: report(Path(job), rest),
        "raise": lambda: fail(rest),
        "kill": lambda: kill(Path(folder), rest),
        "stubborn": lambda: on_signals(signal.SIG_IGN),
        "polite": lambda: on_signals(None, rest),
        "parent": lambda: have_a_child(Path(folder), rest),
        "environment": lambda: show(rest),
        "describe": describe,
        "chance": chance,
        "warn": warn,
        "talk": talk,
        "wait": lambda: None,
        "lock": lambda: ctypes.PyDLL(None).sleep(60),  # unlike CDLL, it keeps the interpreter lock
        "page": lambda: keep_page(Path(folder), Path(job), rest),
    }
    actions[word]()
    Path(folder, f"{RANK}.ready").touch()
    time.sleep(60)


if __name__ == "__main__":
    main()
