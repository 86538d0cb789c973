"""The processes of local ranks: what one is started with, what the launcher does with it, and how each starts anew.

``fork_server`` is the faster way, by which they share one import.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from megatron_run_engine.run_folder.folder import open_log


class RankStart(NamedTuple):
    """What one rank has for itself: variables besides those of all ranks, and the log for its descriptors 1 and 2."""

    variables: Mapping[str, str]
    log: Path


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


@contextmanager
def spawned_ranks(
    program: Sequence[str], job: Path, lifeline: int, environment: Mapping[str, str], starts: Sequence[RankStart]
) -> Iterator[Sequence[RankProcess]]:
    """One process of ``program`` for each of ``starts``. None is left running when the block ends."""
    ranks: list[SpawnedRank] = []
    try:
        for variables, log in starts:
            ranks.append(spawn([*program, str(job)], {**environment, **variables}, log, (lifeline,)))
        yield ranks
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill_group()
                rank.wait()
