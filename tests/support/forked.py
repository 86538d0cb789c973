"""Whole runs without their start-up: the launcher and its ranks are forked from a process that has all imported.

Everything is as the command does it, the local launcher, its watching, the rendezvous, the run folder, but that
processes are forked and not started. A server that has torch loaded and has never computed, so that it has one thread,
forks the launcher; that one forks its ranks before it starts a thread. :class:`ForkedCommand` takes the command's
words, :class:`ForkedRun` a request.
"""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from megatron_run.config.request import Request
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.launch.fork_server import become_rank
from megatron_run_engine.launch.job import Job
from tests.support.installed import read_once
from tests.support.processes import alive, wait_until
from tests.support.ranks import CONTEXT, start_server
from tests.support.resuming import COMPARED

#: What a test of faults trains: steps of some milliseconds, nothing shown, every step saved.
TINY: Mapping[str, Any] = {
    "model.num_layers": 2,
    "model.hidden_size": 16,
    "train.sequence_length": 8,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 4,
    "train.steps": 4,
    "eval.interval": 0,
    "eval.batches": 1,
    "data.vocab_size": 32,
    "checkpoint.interval": 1,
    "run.threads": 1,
    "run.device": "cpu",
    "observer.use": "jsonl",
}


@dataclass(frozen=True)
class Ran:
    """How a run ended: exit code, the line that the user sees, what else was said, seconds from first to last.

    ``ended`` is when, in seconds since the epoch.
    """

    code: int
    message: str
    told: tuple[str, ...]
    seconds: float
    ended: float
    pids: tuple[int, ...]


def tiny(folder: Path, values: Mapping[str, Any] | None = None, plugins: Sequence[str] = (), **asked: Any) -> Request:
    """A request for ``preset:tiny``, made tinier; ``asked`` are more fields of it."""
    return Request(
        ("preset:tiny",), plugins=tuple(plugins), values={**TINY, "run.folder": str(folder), **(values or {})}, **asked
    )


@dataclass
class ForkedRun:
    """A run under way. Used as a context, it leaves nothing behind."""

    request: Request
    fault: str = ""
    timeout: float = 60.0
    max_restarts: int = 0
    pids: list[int] = field(default_factory=list)

    def __enter__(self) -> ForkedRun:
        start_server()
        self._began = time.monotonic()
        self._reader, writer = CONTEXT.Pipe(duplex=False)
        environment = {"MEGATRON_RUN_FAULT": self.fault} if self.fault else {}
        told = (writer, self.request.to_json(), environment, self.max_restarts)
        self._process = CONTEXT.Process(target=_launch, args=told)
        self._process.start()
        writer.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the launcher."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self) -> Ran:
        """How it ended. Afterwards no rank is alive."""
        kind: str = ""
        value: Any = None
        while kind != "ended":
            if not self._reader.poll(max(0.0, self._began + self.timeout - time.monotonic())):
                raise TimeoutError(f"the run did not end within {self.timeout:g} s")
            kind, value = self._reader.recv()
            if kind == "rank":
                self.pids.append(value)
        seconds, ended = time.monotonic() - self._began, time.time()
        wait_until(lambda: not any(map(alive, self.pids)), 1.0)
        gone, self.pids = tuple(self.pids), []  # their numbers may be somebody else's by now
        code, message, told = value
        return Ran(code, message, tuple(told), seconds, ended, gone)


def run_forked(request: Request, fault: str = "", timeout: float = 60.0, max_restarts: int = 0) -> Ran:
    """Run ``request`` to its end, with ``fault`` as ``MEGATRON_RUN_FAULT``."""
    with ForkedRun(request, fault, timeout, max_restarts) as run:
        return run.wait()


#: Programs that can be forked, by the function that they call.
MEGATRON_RUN, TORCHRUN_AGENT = "megatron_run_cli.__main__:program", "torch.distributed.run:main"
FORKING_AGENT = f"{__name__}:forking_agent"


class ForkedCommand:
    """``megatron-run`` with ``words`` in ``folder``, as :class:`subprocess.Popen` would start it, under way.

    Used as a context, it leaves nothing behind: its ranks end with it. What another ``program`` starts is not forked.
    """

    def __init__(self, words: Sequence[str], folder: Path, *, program: str = MEGATRON_RUN, **variables: str) -> None:
        start_server()
        self.args = tuple(words)
        self.returncode: int | None = None
        self._said = tempfile.TemporaryDirectory()
        environment = {**os.environ, **variables}
        told = (program, self.args, str(folder), environment, self._said.name)
        self._process = CONTEXT.Process(target=_command, args=told)
        self._process.start()

    def __enter__(self) -> ForkedCommand:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._said.cleanup()

    @property
    def pid(self) -> int:
        """The launcher's process."""
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the launcher."""
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it said on standard output and standard error, once it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"megatron-run {' '.join(self.args)} did not end within {timeout:g} s")
        self.returncode = self._process.exitcode
        out, err = ((Path(self._said.name) / name).read_text() for name in ("out", "err"))
        return out, err


def forked_command(
    words: Sequence[str],
    folder: Path,
    *,
    timeout: float = 90,
    variables: Mapping[str, str] | None = None,
    program: str = MEGATRON_RUN,
) -> subprocess.CompletedProcess[str]:
    """Run ``megatron-run`` with ``words`` in ``folder`` to its end."""
    with ForkedCommand(words, folder, program=program, **(variables or {})) as command:
        out, err = command.communicate(timeout)
        assert command.returncode is not None
        return subprocess.CompletedProcess(command.args, command.returncode, out, err)


def forking_agent() -> None:
    """torchrun, but for its ranks, which are forked from the agent and need not import torch anew.

    They begin once all are forked: a thread of the agent's store resolves the names of clients. If it holds the C
    library's lock during a fork, the rank can never take that lock.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
    from torch.distributed.launcher.api import elastic_launch

    from megatron_run_cli.main import main

    start: Callable[[MultiprocessContext], None] = MultiprocessContext._start
    gate = [-1, -1]

    def start_all(ranks: MultiprocessContext) -> None:
        gate[:] = os.pipe()
        try:
            start(ranks)
        finally:
            for end in gate:
                os.close(end)

    def rank(*words: str) -> None:
        os.close(gate[1])
        os.read(gate[0], 1)  # returns once nobody holds the other end any more
        if code := main(words[words.index("megatron_run_cli") + 1 :]):
            sys.exit(code)

    def launch_forked(config: Any, entrypoint: str) -> Any:
        config.start_method = "fork"
        return elastic_launch(config, rank)

    with (
        mock.patch.object(run, "elastic_launch", launch_forked),
        mock.patch.object(MultiprocessContext, "_start", start_all),
    ):
        run.main()


def _command(program: str, words: tuple[str, ...], folder: str, environment: Mapping[str, str], said: str) -> None:
    """What is between a fork and the command's program."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv[:] = ["megatron-run", *words]
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(Path(said) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    with _forking_ranks(lambda pid: None):
        pkgutil.resolve_name(program)()


def _launch(pipe: Connection, request: str, environment: Mapping[str, str], max_restarts: int) -> None:
    """The launcher's process: what the command does, once its words are read."""
    from megatron_run.errors import RunError
    from megatron_run_engine.launch import LaunchOptions, launch

    os.setsid()
    os.environ.update(environment)
    told: list[str] = []
    asked = replace(Request.from_json(request), environment=environment)
    try:
        with _forking_ranks(lambda pid: pipe.send(("rank", pid))):
            result = launch(asked, LaunchOptions(quiet=True, max_restarts=max_restarts, tell=told.append), "local")
        pipe.send(("ended", (int(result.code), result.message, told)))
    except RunError as error:
        pipe.send(("ended", (int(error.exit_code), str(error), told)))
    except BaseException as error:
        pipe.send(("ended", (1, repr(error), told)))


@contextmanager
def _forking_ranks(tell: Callable[[int], None]) -> Iterator[None]:
    """Within: the launcher forks its ranks itself, and tells the process of each; what is installed is known."""

    @contextmanager
    def started(
        _servers: object, path: Path, job: Job, environment: Mapping[str, str]
    ) -> Iterator[Sequence[ForkedProcess]]:
        ranks = []
        for rank in range(job.size):
            ranks.append(ForkedProcess(path, job, environment, rank))
            tell(ranks[-1].pid)
        yield ranks

    with read_once(), mock.patch("megatron_run_engine.launch.local.forked_ranks", started):
        yield


class ForkedProcess:
    """A rank that the launcher forks from itself, and not from a server: a ``RankProcess`` to it."""

    def __init__(self, path: Path, job: Job, environment: Mapping[str, str], rank: int) -> None:
        ears = [thread for thread in threading.enumerate() if thread.name == "signals"]  # the command's alone
        others = len(list(Path("/proc/self/task").iterdir())) - 1 - len(ears)
        assert not others, "a thread would be missing in the rank"
        self.returncode: int | None = None
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
        self.pid = os.fork()
        if self.pid == 0:
            _become_rank(path, job, environment, rank, masked)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)

    def poll(self) -> int | None:
        """Its exit status as :class:`subprocess.Popen` gives it, None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        status = self._reap(0)
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill it and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _become_rank(path: Path, job: Job, environment: Mapping[str, str], rank: int, masked: Iterable[int]) -> NoReturn:
    """Undo what a rank of the server never had: the launcher's files, environment and signals."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for handle in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  # numbers, and not paths
        if handle > 2 and handle != job.lifeline:  # the launcher's end of the lifeline among them
            with suppress(OSError):
                os.close(handle)
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    become_rank(path, job, rank)


def learned(folder: Path) -> dict[int, dict[str, Any]]:
    """By step what was learned in the run ``folder``, from ``metrics.jsonl``: the last line of a step wins.

    Nothing before there is such a file.
    """
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written
    return {row["step"]: {name: row[name] for name in COMPARED} for row in rows}


def saved_bits(folder: Path, step: int) -> dict[str, str]:
    """The SHA-256 of each shard of a saved step, of which every byte is verified."""
    manifest = Checkpoints(folder / "checkpoints").verify(step)
    return {name: file.sha256 for name, file in manifest.files.items()}
