"""The program of one local rank.

``python -m megatron_run_engine.launch.rank JOB``, with torchrun's variables set. The launcher's side is ``local.py``;
what a rank does from here on, whoever started it, is ``worker.py``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_run.errors import ExitCode
from megatron_run.errors.machine_limits import system_limit
from megatron_run_engine.launch.job import Job, LaunchOptions, page_path
from megatron_run_engine.launch.rank_output import flush_output
from megatron_run_engine.launch.start import heed_interrupts
from megatron_run_engine.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.launch.planned import Decide


def main(path: Path, run: ResolvedRun | None = None) -> int:
    """Run the rank that the environment names for the job at ``path``, whose ``run`` may be known; its exit code."""
    heed_interrupts()  # the training handles them itself
    job = Job.read(path)
    hold_lifeline(job.lifeline)

    from megatron_run_engine.host.environments import local_world
    from megatron_run_engine.launch.worker import RankWorker

    world = local_world(os.environ, job.init_method)
    folder = RunFolder(job.folder, job.attempt, world.rank)
    page, work = page_path(path, world.rank), None if job.task is None else job.task.work

    def taken(_latest: Mapping[str, str], _decide: Decide) -> ResolvedRun:  # the run of the job has it
        return job.take_over() if run is None else run

    result = RankWorker(taken, world, LaunchOptions(debug=job.debug), folder=folder, page=page, work=work).run()
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
