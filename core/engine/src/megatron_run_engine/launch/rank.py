"""The program of one local rank, and the job that it is given.

``python -m megatron_run_engine.launch.rank JOB``, with torchrun's variables set. The launcher's side is ``local.py``;
what a rank does from here on, whoever started it, is ``worker.py``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode
from megatron_run.errors.machine_limits import system_limit
from megatron_run_engine.launch.options import LaunchOptions
from megatron_run_engine.launch.rank_output import flush_output
from megatron_run_engine.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from megatron_run.contracts.activity import Activity
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.runtime.world import World

#: What each rank runs, with the job's path as its last argument. With -P no module lying in the current folder is taken
#: for one of Python's or torch's.
RANK_PROGRAM = (sys.executable, "-P", "-m", "megatron_run_engine.launch.rank")


@dataclass(frozen=True)
class RankTask:
    """The work of ranks instead of a training: functions of ``module``, named so that another process finds them.

    They get ``arguments``, a mapping of JSON's types. ``resolve_run(request, arguments)`` returns the run, equal on all
    ranks; ``work(run, world, activity, arguments)`` does this rank's part of the task.
    """

    module: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def resolve_run(self, request: Request) -> ResolvedRun:
        """The run, as the module makes it."""
        run: ResolvedRun = import_module(self.module).resolve_run(request, self.arguments)
        return run

    def work(self, run: ResolvedRun, world: World, activity: Activity) -> None:
        """Do this rank's part."""
        import_module(self.module).work(run, world, activity, self.arguments)


@dataclass(frozen=True)
class Job:
    """The work of ``size`` ranks of this host, as their launcher starts it and each of them reads it.

    ``request`` is what the user typed; ``folder``, ``attempt`` the run folder opened by the launcher. A rank has
    ``threads`` threads, and ``debug`` keeps its tracebacks. With ``fork`` the ranks are forked from a process that has
    imported everything. ``shown`` are variables of rank 0, by which it knows that a terminal shows it. A rank whose
    status page does not change for ``timeout`` seconds hangs, unless it waits for another. Without a ``task`` it is a
    training.

    Once it is started, ``init_method`` is the address of the rendezvous, and ``lifeline`` a file descriptor that reads
    end-of-file when the launcher is gone.
    """

    request: Request
    folder: Path
    attempt: int
    size: int
    threads: int = 1
    fork: bool = False
    debug: bool = False
    timeout: float = inf
    shown: Mapping[str, str] = field(default_factory=dict)
    task: RankTask | None = None
    init_method: str = ""
    lifeline: int = -1

    def resolve_run(self) -> ResolvedRun:
        """The run, the same on every rank. Raises what is wrong with it."""
        from megatron_run.planning import resolve

        make = resolve if self.task is None else self.task.resolve_run
        return make(replace(self.request, nproc=self.size))

    def log(self, rank: int) -> Path:
        """The file of descriptors 1 and 2 of ``rank``."""
        return RunFolder(self.folder, self.attempt).log(rank)

    def variables(self, rank: int) -> dict[str, str]:
        """The variables of ``rank`` besides those of all ranks: torchrun's, and for rank 0 those of the terminal."""
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
        return {name: str(value) for name, value in place.items()} | (dict(self.shown) if rank == 0 else {})

    def write(self, path: Path) -> None:
        """Write the job where a rank will :meth:`read` it."""
        task = None if self.task is None else asdict(self.task)
        content = {**vars(self), "request": self.request.to_json(), "folder": str(self.folder), "task": task}
        path.write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read what :meth:`write` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        content["request"] = Request.from_json(content["request"])
        content["folder"] = Path(content["folder"])
        content["task"] = None if content["task"] is None else RankTask(**content["task"])
        return cls(**content)


def page_path(job: Path, rank: int) -> Path:
    """The status page of ``rank``, next to the ``job`` file."""
    return job.with_name(f"page-{rank}")


def main(path: Path, run: ResolvedRun | None = None) -> int:
    """Run the rank that the environment names for the job at ``path``, whose ``run`` may be known; its exit code."""
    # No traceback when Ctrl-C comes before the training, which handles it, or after.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    job = Job.read(path)
    hold_lifeline(job.lifeline)

    from megatron_run_engine.host.environments import local_world
    from megatron_run_engine.launch.worker import RankWorker

    world = local_world(os.environ, job.init_method)
    folder = RunFolder(job.folder, job.attempt, world.rank)
    page, work = page_path(path, world.rank), None if job.task is None else job.task.work

    def make(_latest: Mapping[str, str]) -> ResolvedRun:  # the request of the job has it
        return job.resolve_run() if run is None else run

    result = RankWorker(make, world, LaunchOptions(debug=job.debug), folder=folder, page=page, work=work).run()
    result.write(path)  # also of one that ended well: a plugin may have called os._exit(0)
    return result.status


def failed_start(error: BaseException) -> int:
    """The exit status of a process that fails before it is a rank; what the log says last is what the user is told."""
    known = system_limit(error)
    if known is None:
        traceback.print_exception(error)
        return int(ExitCode.BUG)
    print(known, file=sys.stderr)  # noqa: T201  # into the log
    return int(known.exit_code)


def hold_lifeline(descriptor: int) -> None:
    """Kill this process and its children as soon as nobody holds the other end of the pipe.

    A thread does that, which cannot where this process is stopped or keeps the interpreter lock in C: who started it
    has another process that can (``start``, ``fork_server``).
    """

    def wait() -> None:
        while os.read(descriptor, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    try:
        status = main(Path(sys.argv[1]))
    except Exception as error:
        status = failed_start(error)
    flush_output()
    os._exit(status)  # skip finalizers: they may wait for a communicator whose peer is gone
