"""The records of a job: how it is started, what its ranks are given, how each rank ended, and how the run did."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_run.errors import ExitCode
from megatron_run.files.publishing import publishing
from megatron_run_engine.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from megatron_run.contracts.activity import Activity
    from megatron_run.drawing.sheet import Picture
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.run_folder import History
    from megatron_run_engine.run_folder.history import HasFolder
    from megatron_run_engine.runtime.world import World


@dataclass(frozen=True)
class LaunchOptions:
    """How a run is started, apart from what is trained.

    ``arguments`` are remembered in the run folder; ``quiet`` shows nothing of rank 0; ``debug`` keeps tracebacks of
    documented errors too; ``tell`` shows a line of the launcher to the user. Local ranks are started again at most
    ``max_restarts`` times.
    """

    arguments: Sequence[str] = ()
    quiet: bool = False
    debug: bool = False
    max_restarts: int = 0
    tell: Callable[[str], None] = print


@dataclass(frozen=True)
class RankTask:
    """The work of ranks instead of a training: functions of ``module``, named so that another process finds them.

    ``work(run, world, activity, arguments)`` does a rank's part of the task, with ``arguments``, a mapping of JSON's
    types. ``objects()`` returns the plugins that the module itself has handed to the run.
    """

    module: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def objects(self) -> Sequence[object]:
        """The plugins of the module's own."""
        objects: Sequence[object] = import_module(self.module).objects()
        return objects

    def work(self, run: ResolvedRun, world: World, activity: Activity) -> None:
        """Do this rank's part."""
        import_module(self.module).work(run, world, activity, self.arguments)


@dataclass(frozen=True)
class Job:
    """The work of ``size`` ranks of this host, as their launcher starts it and each of them reads it.

    ``handed`` is the resolved run as text (:mod:`megatron_run.planning.run_text`); ``folder``, ``attempt`` the run
    folder opened by the launcher. A rank has ``threads`` threads, and ``debug`` keeps its tracebacks. With ``fork`` the
    ranks are forked from a process that has imported everything. ``places`` are the local numbers of the ranks, which
    choose their GPUs: all in order unless some are left out. ``shown`` are variables of rank 0, by which it knows
    that a terminal shows it. A rank whose status page does not change for ``timeout`` seconds hangs, unless it waits
    for another. Without a ``task`` it is a training.

    Once it is started, ``init_method`` is the address of the rendezvous, and ``lifeline`` a file descriptor that reads
    end-of-file when the launcher is gone.
    """

    handed: str
    folder: Path
    attempt: int
    size: int
    threads: int = 1
    fork: bool = False
    debug: bool = False
    timeout: float = inf
    places: Sequence[int] = ()
    shown: Mapping[str, str] = field(default_factory=dict)
    task: RankTask | None = None
    init_method: str = ""
    lifeline: int = -1

    def take_over(self) -> ResolvedRun:
        """The run, as the launcher has resolved it. Raises what the import of a plugin does."""
        from megatron_run.planning.run_text import take_over

        return take_over(self.handed, () if self.task is None else self.task.objects())

    def log(self, rank: int) -> Path:
        """The file of descriptors 1 and 2 of ``rank``."""
        return RunFolder(self.folder, self.attempt).log(rank)

    def variables(self, rank: int) -> dict[str, str]:
        """The variables of ``rank`` besides those of all ranks: torchrun's, and for rank 0 those of the terminal."""
        places = self.places or range(self.size)
        here = max(places) + 1  # those left out among them
        place = {"RANK": rank, "LOCAL_RANK": places[rank], "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": here}
        return {name: str(value) for name, value in place.items()} | (dict(self.shown) if rank == 0 else {})

    def write(self, path: Path) -> None:
        """Write the job where a rank will :meth:`read` it."""
        task = None if self.task is None else asdict(self.task)
        content = {**vars(self), "folder": str(self.folder), "task": task}
        path.write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read what :meth:`write` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        content["folder"] = Path(content["folder"])
        content["task"] = None if content["task"] is None else RankTask(**content["task"])
        return cls(**content)


def page_path(job: Path, rank: int) -> Path:
    """The status page of ``rank``, next to the ``job`` file."""
    return job.with_name(f"page-{rank}")


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


class Lost(NamedTuple):
    """When a rank ``died`` or did something last, its launcher ``detected`` it, and the last rank had ``ended``.

    All in seconds since the epoch.
    """

    died: float
    detected: float
    ended: float = 0.0


@dataclass(frozen=True)
class RunResult:
    """How a run ended: exit code, its folder when there is one, and the line to show, which may be empty.

    ``steps`` is the last step that is done, as the run folder tells, or how many local ranks have done, as their status
    pages tell; ``begun`` is the last step that these have begun. ``rank`` is the local rank that failed first, None
    where nobody knows, and ``lost`` says when.
    """

    code: ExitCode
    folder: Path | None = None
    message: str = ""
    steps: int = 0
    rank: int | None = None
    lost: Lost | None = None
    begun: int = 0

    @property
    def history(self) -> History:
        """The numbers of all attempts, read from the run folder. Raises :class:`InputError` without one."""
        from megatron_run_engine.run_folder import History
        from megatron_run_engine.run_folder.history import folder_of

        return History(folder_of(self))

    @property
    def losses(self) -> list[float | None]:
        """The loss of each step."""
        return self.history.losses

    @property
    def best(self) -> Path | None:
        """The saved step with the lowest validation loss: what :func:`megatron_run.load` takes."""
        return self.history.best

    def plot(self, *others: str | Path | HasFolder, names: Sequence[str] = ()) -> Picture:
        """The curves of the run as a picture, as :meth:`History.plot` draws them."""
        return self.history.plot(*others, names=names)

    def frame(self) -> Any:
        """All metrics as a data frame of pandas, by step. Raises :class:`InputError` without pandas."""
        return self.history.frame()
