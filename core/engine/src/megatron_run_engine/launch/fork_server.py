"""Forks the ranks of one host from a process that has imported everything, so that they share one import.

``python -m megatron_run_engine.launch.fork_server SOCKET LAUNCHER`` gets the descriptor of its end of a socket, and the
number of its launcher, whose side is ``start.Servers``. The socket brings the path of a job, and once its ranks have
ended that of the next attempt's, whose ranks find all imported.

Imports are four seconds of processor time, most of a rank's start. The server is a fresh process, because OpenMP, glibc
and torch read their variables when they are loaded. It imports torch and the chosen plugins, forks while it has one
thread, and tells the launcher what becomes of the ranks, as it is their parent. When the launcher is gone it kills
them, also those that hang or are stopped and cannot end by themselves.

The fork server of multiprocessing does not suit a library: a program has only one, it keeps the environment of its
first use, and its children import the caller's main module.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron_run.errors import ExitCode
from megatron_run_engine.launch.job import Job
from megatron_run_engine.launch.rank import failed_start, main
from megatron_run_engine.launch.rank_output import flush_output, redirect_output
from megatron_run_engine.launch.start import RANK_PROGRAM, heed_interrupts, spawn

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun

#: ``PR_SET_PDEATHSIG`` of Linux's ``prctl``.
_DEATH_SIGNAL = 1


def serve(control: socket.socket, launcher: int) -> int:
    """Import, start the ranks of each job whose path comes over ``control``, and report their ends.

    That ends once the process ``launcher`` has closed its end of ``control``. Returns the exit status of this process,
    which is that of the ranks that it could not start.
    """
    try:
        _serve(control, launcher)
    except Exception as error:
        return failed_start(error)
    return 0


def _serve(control: socket.socket, launcher: int) -> None:
    gc.disable()  # little of what imports make becomes garbage, and looking for it takes a while
    with _ending_with(launcher):
        path = _next_job(control)
        run = None if path is None else preload(Job.read(path))
    gc.enable()
    wakeup, bell = socket.socketpair()
    for each in (wakeup, bell):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, without which no byte is written to the bell
    signal.set_wakeup_fd(bell.fileno())
    while path is not None:
        job = Job.read(path)
        gc.freeze()  # the ranks do not write to the pages of what is here by looking for garbage in it
        # A lock that another thread holds during a fork is never released.
        begin = partial(_fork, run) if can_fork() else _spawn
        processes = []
        for rank in range(job.size):
            processes.append(begin(path, job, rank, (control, wakeup, bell)))
            _tell(control, "started", rank, processes[rank])
        path = _report(control, wakeup, processes)
        run = None if path is None else preload(Job.read(path))


def _next_job(control: socket.socket) -> Path | None:
    """The path of the next job, None once the launcher is done or gone."""
    said = b""
    with suppress(ConnectionError):
        while not said.endswith(b"\n") and (more := control.recv(1 << 12)):
            said += more
    return Path(said.decode().removesuffix("\n")) if said.endswith(b"\n") else None


@contextmanager
def _ending_with(launcher: int) -> Iterator[None]:
    """Within: the kernel kills this process, which hears nobody while it imports, once its ``launcher`` is gone.

    Later it would be left no time to kill the ranks. Linux alone has this; elsewhere the imports come to their end.
    """
    call = getattr(ctypes.CDLL(None), "prctl", None)
    if call is None:
        yield
        return
    call(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != launcher:  # it was gone before. In a container it may be process 1
        os._exit(int(ExitCode.RANK_LOST))
    try:
        yield
    finally:
        call(_DEATH_SIGNAL, 0)


def _fork(run: ResolvedRun | None, path: Path, job: Job, rank: int, private: Sequence[socket.socket]) -> int:
    process = os.fork()
    if process == 0:
        for each in private:
            each.close()
        become_rank(path, job, rank, run)
    return process


def _spawn(path: Path, job: Job, rank: int, _private: Sequence[socket.socket]) -> int:
    environment = {**os.environ, **job.variables(rank)}
    return spawn([*RANK_PROGRAM, str(path)], environment, job.log(rank), (job.lifeline,)).pid


def _report(control: socket.socket, wakeup: socket.socket, processes: Sequence[int]) -> Path | None:
    """Report the end of each rank. Return the path of the next job, None when the launcher is done or gone.

    What is left of the ranks is ended first.
    """
    running = dict(enumerate(processes))
    while control not in wait([control, wakeup]):
        with suppress(BlockingIOError):
            wakeup.recv(1 << 16)
        for rank, process in tuple(running.items()):
            # WNOWAIT leaves a zombie, so that no other process gets the number by which the launcher kills its group.
            ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                del running[rank]
                _tell(control, "ended", rank, ended.si_status * (1 if ended.si_code == os.CLD_EXITED else -1))
    for process in running.values():
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    for process in processes:
        os.waitpid(process, 0)
    return _next_job(control)


def preload(job: Job) -> ResolvedRun | None:
    """Import what every rank of ``job`` will, and take over its run, which all of them share.

    None if something is wrong with it: each rank finds that by itself, and says so.
    """
    run = None
    _import_numpy()
    with suppress(Exception):
        from megatron_run_engine.launch import worker  # noqa: F401  # all that trains

        run = job.take_over()
        import torch.fx.experimental.symbolic_shapes  # a first backward does, and with it sympy

        if run.one("graph-capture").name != "none":  # it may compile: torch's compiler is another second
            import torch._inductor  # noqa: F401
    sys.stdout.flush()
    sys.stderr.flush()
    return run


def _import_numpy() -> None:
    """Import numpy without the threads of its OpenBLAS, of which it starts as many as a rank has: none could be forked.

    In forked ranks its products have one thread. torch's libraries, loaded later, find the variable as the user set it.
    """
    name = "OPENBLAS_NUM_THREADS"
    unset = name not in os.environ
    os.environ.setdefault(name, "1")
    import numpy  # noqa: F401  # torch would import it, with its threads

    if unset:
        del os.environ[name]


def can_fork() -> bool:
    """Whether a fork of this process is as good as a new one: no import has started a thread or CUDA."""
    import torch

    return len(list(Path("/proc/self/task").iterdir())) == 1 and not torch.cuda.is_initialized()


def become_rank(path: Path, job: Job, rank: int, run: ResolvedRun | None = None) -> NoReturn:
    """Be what ``python -m megatron_run_engine.launch.rank JOB`` would be, in a process that was just forked.

    The ``run`` of the job may have been taken over before the fork.
    """
    try:
        os.setsid()  # a process group of its own, which is killed with all that the rank has started
        signal.set_wakeup_fd(-1)  # the bell is the server's: the rank has closed its copy
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        redirect_output(job.log(rank))
        os.environ.update(job.variables(rank))
        sys.argv[1:] = [str(path)]
        if "numpy.random" in sys.modules:  # Python's own generator is seeded anew by a fork, and torch's by the run
            sys.modules["numpy.random"].seed()
        status = main(path, run)
    except BaseException as error:
        status = int(ExitCode.BUG)
        with suppress(ValueError):  # it may have closed its output
            status = failed_start(error)
    flush_output()
    os._exit(status)


def _tell(control: socket.socket, event: str, rank: int, number: int) -> None:
    with suppress(ConnectionError):  # the launcher is gone, perhaps before it has read all: seen next
        control.sendall(f"{event} {rank} {number} {time.time():.4f}\n".encode())


if __name__ == "__main__":
    heed_interrupts()
    status = serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    os._exit(status)  # nothing is left to do, and finalizers of what was imported take a while
