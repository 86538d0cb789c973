"""The processes of local ranks, as their launcher starts them: each anew, or forked from a server (``fork_server``)."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron_run.errors import InputError
from megatron_run.errors.machine_limits import system_limit
from megatron_run.files.safe_folder import SafeFolder
from megatron_run_engine.run_folder.folder import open_log

if TYPE_CHECKING:
    from megatron_run_engine.launch.job import Job


#: What each rank runs, with the job's path as its last argument. With -P no module lying in the current folder is taken
#: for one of Python's or torch's.
RANK_PROGRAM = (sys.executable, "-P", "-m", "megatron_run_engine.launch.rank")
#: What a server runs that forks them, with the job's path, its end of a socket and its launcher's number after it.
SERVER_PROGRAM = (sys.executable, "-P", "-m", "megatron_run_engine.launch.fork_server")
#: Seconds until a server that does not answer is killed, and its ranks with it.
_PATIENCE = 5.0


class RankProcess(Protocol):
    """The process of a rank. ``returncode`` is as :class:`subprocess.Popen` has it, None until an end was seen."""

    @property
    def returncode(self) -> int | None: ...  # noqa: D102  # above

    def poll(self) -> int | None:
        """Look whether it has ended: ``returncode``."""

    def wait(self) -> int:
        """``returncode``, once it has ended."""

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, if it still runs."""

    def kill_group(self) -> None:
        """Kill it and what it has started, if any of that still runs."""


class SpawnedRank(subprocess.Popen[bytes]):
    """A rank with an interpreter of its own."""

    def kill_group(self) -> None:
        """Kill it and what it has started, if any of that still runs."""
        with suppress(ProcessLookupError, PermissionError):  # nobody left in it (macOS: only the dead)
            os.killpg(self.pid, signal.SIGKILL)


def spawn(words: Sequence[str], environment: Mapping[str, str], log: Path, inherited: Sequence[int]) -> SpawnedRank:
    """Start ``words`` as the leader of a process group, so that Ctrl-C at the terminal reaches only the launcher.

    A SIGINT that is forwarded waits until the process attends to it (:func:`heed_interrupts`): one that Python raises
    within its first imports may be lost there.
    """
    with os.fdopen(open_log(log), "ab") as file, _held_back(signal.SIGINT):
        return SpawnedRank(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=inherited,
            start_new_session=True,
        )


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Within: processes that this thread starts begin with ``number`` blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def heed_interrupts() -> None:
    """Let SIGINT end this process without a traceback, from now on, as one does that has come since its start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


#: What the names of launchers' temporary folders begin with, and the file in each that its launcher has locked.
_SCRATCH, _LOCK = "megatron-run-", ".launcher"
#: Kills the process groups of which it was told, once who told it is gone without a last word.
_GUARD = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
*groups, last = (sys.stdin.read() or "done").split()
for group in groups + [last] if last != "done" else ():
    try:
        os.killpg(int(group), signal.SIGKILL)
    except OSError:
        pass
"""


@contextmanager
def _guard() -> Iterator[Callable[[int], None]]:
    """A process that kills the groups it is told of if this one dies within the block, however it dies.

    The kernel's parent-death signal would not do: it kills a rank before that can end what it has started itself.
    """
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert guard.stdin is not None
    pipe = guard.stdin

    def tell(message: object) -> None:
        with suppress(OSError):  # somebody has killed it: then the ranks' own lifelines must do
            pipe.write(f"{message}\n".encode())
            pipe.flush()

    try:
        yield tell
    finally:
        tell("done")
        with suppress(OSError):
            pipe.close()
        guard.wait()


@contextmanager
def spawned_ranks(
    program: Sequence[str], path: Path, job: Job, environment: Mapping[str, str]
) -> Iterator[Sequence[RankProcess]]:
    """One process of ``program`` for each rank of ``job``, which lies at ``path``. None runs when the block ends."""
    ranks: list[SpawnedRank] = []
    with _guard() as tell:
        try:
            for rank in range(job.size):
                own = {**environment, **job.variables(rank)}
                ranks.append(spawn([*program, str(path)], own, job.log(rank), (job.lifeline,)))
                tell(ranks[-1].pid)
            yield ranks
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill_group()
                    process.wait()


class Servers:
    """The servers that fork the ranks of a run's attempts. Used as a context; none is left when it ends.

    One stays from attempt to attempt, so that what ranks import is imported once; a rank's environment is that of its
    server. ``lifeline`` reads end-of-file once this process is gone, in every process that gets it.
    """

    def __init__(self) -> None:
        # No process inherits the write end, so that the kernel closes it, and wakes the ranks, when this one dies.
        self.lifeline, self._write_end = os.pipe()
        self._server: _Server | None = None

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        finally:
            os.close(self._write_end)
            os.close(self.lifeline)

    def of(self, environment: Mapping[str, str], log: Path) -> _Server:
        """A server with this ``environment``. What a new one prints itself, as warnings of imports, is in ``log``."""
        if self._server is None or not self._server.serves(environment):
            self._end()
            parent_end, child_end = socket.socketpair()
            with child_end:
                words = [*SERVER_PROGRAM, str(child_end.fileno()), str(os.getpid())]
                process = spawn(words, environment, log, (self.lifeline, child_end.fileno()))
            self._server = _Server(process, parent_end, environment)
        return self._server

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.end()


@contextmanager
def forked_ranks(
    servers: Servers, path: Path, job: Job, environment: Mapping[str, str]
) -> Iterator[Sequence[RankProcess]]:
    """One process for each rank of ``job``, which lies at ``path``, forked once a server has imported all.

    The server of the job before does, if there is one. None runs when the block ends.
    """
    ranks = servers.of(environment, job.log(0)).fork(path, job.size)
    try:
        yield ranks
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill_group()
                rank.wait()


class ForkedRank:
    """A rank whose parent is the server. Its process id is not used again before the server forks for another job.

    ``ended`` is when the server saw its end, in seconds since the epoch.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.pid: int | None = None
        self.returncode: int | None = None
        self.ended: float | None = None

    def poll(self) -> int | None:
        """Look whether it has ended: ``returncode``."""
        if self.returncode is None:
            self._server.hear(0.0)
        return self.returncode

    def wait(self) -> int:
        """``returncode``, once it has ended. A server that says nothing of a rank which was killed is killed too."""
        while self.returncode is None:
            if not self._server.hear(_PATIENCE):
                self._server.process.kill()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal if it still runs; before it is forked, to the server, which then forks no rank."""
        if self.poll() is None:
            os.kill(self._server.process.pid if self.pid is None else self.pid, number)

    def kill_group(self) -> None:
        """Kill it and what it has started, if any of that still runs; before it is forked, the server."""
        if self.pid is None:
            self._server.process.kill_group()
        else:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class _Server:
    """The server's process, as the launcher sees it, and the ranks of its last job."""

    def __init__(self, process: SpawnedRank, control: socket.socket, environment: Mapping[str, str]) -> None:
        self.process, self._control, self._rest = process, control, b""
        self._environment = dict(environment)
        self.ranks: list[ForkedRank] = []

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether it is there, and its ranks have this ``environment``."""
        return self.process.poll() is None and self._environment == dict(environment)

    def fork(self, path: Path, size: int) -> list[ForkedRank]:
        """Have it fork ``size`` ranks of the job at ``path``. All of the job before have ended."""
        self.ranks = [ForkedRank(self) for _ in range(size)]
        with suppress(ConnectionError):  # it has ended: heard next
            self._control.sendall(f"{path}\n".encode())
        return self.ranks

    def hear(self, patience: float) -> bool:
        """Take in what the server says within so many seconds; whether it said anything. Its end ends all its ranks."""
        if not wait([self._control], patience):
            return False
        said = b""
        with suppress(ConnectionResetError):  # it ended before it has read what it was told
            said = self._control.recv(1 << 16)
        *lines, self._rest = (self._rest + said).split(b"\n")
        for event, rank, number, when in map(bytes.split, lines):
            if event == b"started":
                self.ranks[int(rank)].pid = int(number)
            else:
                self.ranks[int(rank)].returncode, self.ranks[int(rank)].ended = int(number), float(when)
        if not said:
            status = self.process.wait()
            for each in self.ranks:
                if each.returncode is None:
                    each.kill_group()
                    each.returncode = status
        return True

    def end(self) -> None:
        """End the server, and with it what still runs of its ranks."""
        self._control.close()
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            for rank in self.ranks:
                rank.kill_group()
            self.process.kill_group()
            self.process.wait()


@contextmanager
def starting() -> Iterator[None]:
    """Within: what the operating system refuses to a launcher becomes a :class:`RunError`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if limit := system_limit(error):
            raise limit from error
        if not isinstance(error, OSError):
            raise
        raise InputError(
            "the ranks cannot be started",
            why=f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}",
            fix="run.folder and TMPDIR must lie where there is room and files can be written",
        ) from error


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder of this launcher. Those of launchers that were killed are removed first.

    A launcher holds a lock in its folder, which the operating system releases when it dies.
    """
    for lock in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*/{_LOCK}"):
        with suppress(OSError):  # somebody else's, or another launcher has just removed it
            handle = SafeFolder(lock.parent).open(_LOCK, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.geteuid() and not lock.parent.is_symlink():
                    shutil.rmtree(lock.parent)
            finally:
                os.close(handle)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH) as folder:
        lock, unlocked = Path(folder, _LOCK), Path(folder, f"{_LOCK}.new")
        handle = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            unlocked.rename(lock)  # only now: another launcher takes a lock that nobody holds for a dead one's
            yield Path(folder)
        finally:
            os.close(handle)
