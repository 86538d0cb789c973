"""How a rank ended, and how the run did: the two records of a failure on its way to the user."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.errors import ExitCode, InputError
from megatron_run.files.publishing import publishing

if TYPE_CHECKING:
    from megatron_run_engine.run_folder import History


@dataclass(frozen=True)
class RankResult:
    """How one rank ended: its own report, completed by the local launcher with what only the launcher sees.

    ``status`` is the exit status as :class:`subprocess.Popen` gives it, negative for a signal. ``message`` is one line,
    or one for each of several problems; it is empty where another rank explains the failure. ``secondary``: it failed
    only because another rank did, rank ``lost`` where it knows which.

    The launcher adds: ``reported``, false when the rank left no result; ``order``, in which ranks were seen to end;
    ``deserted``, when it began and ended with status 0 but without a report, as a plugin's ``os._exit(0)`` does;
    ``killed``, by the launcher, because another rank had failed; its ``log``; and ``place``, its last known activity.
    """

    rank: int
    status: int
    message: str = ""
    secondary: bool = False
    lost: int | None = None
    reported: bool = True
    order: int = 0
    killed: bool = False
    deserted: bool = False
    log: Path = Path()
    place: str = ""

    @property
    def failed(self) -> bool:
        """Whether it ended with anything but success."""
        return self.status != 0 or self.deserted

    @property
    def code(self) -> ExitCode:
        """The documented exit code: a signal is a lost rank, an unknown status a bug."""
        if self.status < 0 or self.deserted:
            return ExitCode.RANK_LOST
        try:
            return ExitCode(self.status)
        except ValueError:
            return ExitCode.BUG

    def write(self, job: Path) -> None:
        """Leave the rank's own part next to the ``job`` file, for :meth:`read`: whole or not at all."""
        report = {"message": self.message, "secondary": self.secondary, "lost": self.lost}
        with publishing(_path(job, self.rank), durable=False) as (file,):
            file.write(json.dumps(report).encode())

    @classmethod
    def read(cls, job: Path, rank: int, status: int) -> RankResult:
        """The result of ``rank``, whose process has ended with ``status``; it has left a report, or none.

        A rank that left none but ends with the code of a lost rank is secondary: by that code it reports another rank.
        """
        try:
            return cls(rank, status, **json.loads(_path(job, rank).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls(rank, status, secondary=status == ExitCode.RANK_LOST, reported=False)


def has_reported(job: Path, rank: int) -> bool:
    """Whether ``rank`` has left its result."""
    return _path(job, rank).exists()


def _path(job: Path, rank: int) -> Path:
    return job.with_name(f"result-{rank}.json")


@dataclass(frozen=True)
class RunResult:
    """How a run ended: exit code, its folder when there is one, and the line to show, which may be empty.

    ``steps`` is the last step that is done, as far as the run folder or the status pages of local ranks tell.
    """

    code: ExitCode
    folder: Path | None = None
    message: str = ""
    steps: int = 0

    @property
    def history(self) -> History:
        """The numbers of all attempts, read from the run folder. Raises :class:`InputError` without one."""
        from megatron_run_engine.run_folder import History

        if self.folder is None:
            raise InputError("the run has left no folder")
        return History(self.folder)

    @property
    def losses(self) -> list[float | None]:
        """The loss of each step."""
        return self.history.losses

    @property
    def best(self) -> Path | None:
        """The saved step with the lowest validation loss: what :func:`megatron_run.load` takes."""
        return self.history.best

    def frame(self) -> Any:
        """All metrics as a data frame of pandas, by step. Raises :class:`InputError` without pandas."""
        return self.history.frame()
