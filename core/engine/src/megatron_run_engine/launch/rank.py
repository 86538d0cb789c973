"""The program of one local rank: ``python -m megatron_run_engine.launch.rank JOB``, with torchrun's variables set."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

from megatron_run_engine.launch.job import Job, Report, page_path


def main(path: Path) -> int:
    """Run the rank that the environment names for the job at ``path``; its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while torch is imported, Ctrl-C ends the process without a word
    job = Job.read(path)
    hold_lifeline(job.lifeline)

    from megatron_run.planning import resolve
    from megatron_run_engine.launch.member import Member
    from megatron_run_engine.launch.worlds import local_world
    from megatron_run_engine.run_folder import RunFolder

    world = local_world(os.environ, job.init_method)
    folder = RunFolder(job.folder, job.attempt, world.rank)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on observers may close their files
    request = replace(job.request, nproc=world.size)
    page = page_path(path, world.rank)
    end = Member(lambda: resolve(request), world, print, folder=folder, page=page, debug=job.debug).run()
    if end.code:
        Report(int(end.code), end.message, end.secondary, end.lost).write(path, world.rank)
    return int(end.code)


def hold_lifeline(descriptor: int) -> None:
    """End this process and all it started as soon as nobody holds the other end of the pipe."""

    def wait() -> None:
        while os.read(descriptor, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a communicator whose peer is gone must not hold up the end
