"""The processes of local ranks: what the launcher does with one, and how each starts anew.

``fork_server`` is the faster way, by which they share one import.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron_run.errors import InputError
from megatron_run.errors.machine_limits import system_limit
from megatron_run.files.safe_folder import SafeFolder
from megatron_run_engine.run_folder.folder import open_log

if TYPE_CHECKING:
    from megatron_run_engine.launch.job import Job


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
    """Start ``words`` as the leader of a process group, so that Ctrl-C at the terminal reaches only the launcher."""
    with os.fdopen(open_log(log), "ab") as file:
        return SpawnedRank(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=inherited,
            start_new_session=True,
        )


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
