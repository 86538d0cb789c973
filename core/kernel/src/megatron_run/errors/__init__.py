"""Errors for users, in four parts: what went wrong, why, where it came from, what to type. Each has an exit code.

Every mistake of a user raises one of these, and is printed as one line; only a bug shows a traceback.
:class:`Findings` collects them, so that one pass reports all. Imports: nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from megatron_run.errors.wording import printable


class ExitCode(IntEnum):
    """Exit codes of the process, documented for scripts that resubmit jobs."""

    DONE = 0
    BUG = 1
    INPUT = 2
    PLUGIN = 3
    RANK_LOST = 4
    DATA = 5
    GUARD = 6
    OUT_OF_MEMORY = 7
    TIME_LIMIT = 75
    SIGINT = 130
    SIGTERM = 143

    @property
    def retry(self) -> bool:
        """Whether running the same command again may succeed."""
        return self in (ExitCode.RANK_LOST, ExitCode.TIME_LIMIT, ExitCode.SIGTERM)

    @property
    def stopped_by(self) -> str:
        """The cause that stops a run with this code: a signal by its name, or the time limit."""
        return "the time limit" if self is ExitCode.TIME_LIMIT else self.name


class RunError(Exception):
    """A failure that the user can act on.

    It states ``what`` went wrong and ``why``, the ``origin`` (command line, a YAML line, a plugin) and the ``fix`` to
    type. ``str(error)`` is the line that is printed.
    """

    exit_code = ExitCode.INPUT

    def __init__(self, what: str, *, why: str = "", origin: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.origin, self.fix = what, why, origin, fix

    def __str__(self) -> str:
        line = self.what
        if self.why:
            line += f": {self.why}"
        if self.origin:
            line += f" (from {self.origin})"
        if self.fix:
            line += f"; {self.fix}"
        return printable(line)


class InputError(RunError):
    """The command line, the environment or a configuration asks for something impossible."""


class PluginError(RunError):
    """A plugin is missing, ambiguous or broken, or violates its contract."""

    exit_code = ExitCode.PLUGIN


class EngineMissingError(PluginError):
    """A request that needs the engine, where only the kernel is installed."""


class ScheduleError(PluginError):
    """A schedule refuses a shape, or its action lists are not a legal plan.

    If it refuses the shape of a configuration, the user sees an :class:`InputError`.
    """


class GraphCaptureError(PluginError):
    """A region cannot be captured, or a capture cannot be replayed."""


class RankLostError(RunError):
    """A rank died or stopped answering; ``rank`` is its number, None if it is not known."""

    exit_code = ExitCode.RANK_LOST

    def __init__(self, what: str, *, why: str = "", origin: str = "", fix: str = "", rank: int | None = None) -> None:
        super().__init__(what, why=why, origin=origin, fix=fix)
        self.rank = rank


class DataError(RunError):
    """A data file is missing, damaged or does not fit."""

    exit_code = ExitCode.DATA


class CheckpointError(DataError):
    """A checkpoint is missing, damaged, does not fit the run, or could not be saved."""


class GuardError(RunError):
    """A guard stopped the run; without a change, it would stop again."""

    exit_code = ExitCode.GUARD


class OutOfMemoryError(RunError):
    """The device ran out of memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


#: The most problems that are printed. A file with more is probably not a configuration.
_SHOWN = 20


class Problems(RunError):
    """Several problems found in one pass, printed one per line."""

    def __init__(self, problems: Sequence[RunError]) -> None:
        if not problems:
            raise ValueError("Problems needs at least one problem")
        super().__init__(problems[0].what)
        self.problems = tuple(problems)
        self.exit_code = self.problems[0].exit_code

    def __str__(self) -> str:
        more = len(self.problems) - _SHOWN
        return "\n".join([*map(str, self.problems[:_SHOWN]), *([f"and {more} more mistakes"] if more > 0 else [])])


class ToldToEnd(BaseException):
    """The exception of a handler of a signal. Not an Exception, which a library might take for its own."""


#: The note for whoever ends a training before its ranks start.
NOT_BEGUN = "no step has begun, and nothing was saved"


@contextmanager
def ended_with(note: str) -> Iterator[None]:
    """Within: who ends the process, by Ctrl-C or a signal, reads the ``note`` too."""
    try:
        yield
    except (KeyboardInterrupt, ToldToEnd) as error:
        error.add_note(note)
        raise


def let_end(error: BaseException) -> None:
    """Raise ``error`` again if this process is told to end by it: by Ctrl-C, or :class:`ToldToEnd`.

    Whoever catches BaseException, since a plugin may raise anything, calls it before it names a failure.
    """
    if isinstance(error, KeyboardInterrupt | ToldToEnd):
        raise error


def locate(error: BaseException, where: str) -> None:
    """Add where ``error`` was raised: to the origin of a :class:`RunError`, or as a note to any other exception."""
    if isinstance(error, RunError):
        error.origin = ", ".join(filter(None, (error.origin, where)))
    else:
        error.add_note(where)


#: Why what exists is refused, wherever it is.
KEPT = "nothing is overwritten"


def taken(what: object, option: str = "") -> InputError:
    """The refusal of every command where ``what`` is there already.

    ``option`` is what named it, in a command that has ``--overwrite`` too; without one the command makes a new folder.
    """
    if not option:
        return InputError(f"{what} exists", why=KEPT, fix="name a new folder")
    return InputError(f"{what} exists", fix=f"name another {option}, or add --overwrite")


def refuse_taken(path: Path, option: str, *, overwrite: bool, inputs: Iterable[Path]) -> None:
    """Raise :func:`taken` for a file, unless it may be replaced: before work that would be for nothing.

    ``inputs`` are all files that the command reads, none of which may ever be replaced. A pipe or the terminal is
    written to; for a folder writing it fails.
    """
    refuse_input(path, option, inputs)
    if path.is_file() and not overwrite:
        raise taken(path, option)


def refuse_input(path: Path, option: str, inputs: Iterable[Path]) -> None:
    """Raise :class:`InputError` where ``path`` is one of the ``inputs``: what is made anew without asking too."""
    place = os.path.realpath(path)  # of a link to an input too
    if any(os.path.realpath(each) == place for each in inputs):
        raise InputError(f"{path} is an input too", fix=f"name another {option}")


class Findings:
    """The errors found so far; a run resolves only when there are none."""

    def __init__(self) -> None:
        self.problems: list[RunError] = []

    def add(self, error: RunError) -> None:
        """Add an error, or each of several; duplicates are dropped."""
        found = error.problems if isinstance(error, Problems) else (error,)
        known = {str(problem) for problem in self.problems}
        self.problems += [problem for problem in found if str(problem) not in known]

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Add an error raised in the block and continue after it."""
        try:
            yield
        except RunError as error:
            self.add(error)

    def settle(self) -> None:
        """Raise :class:`Problems` when anything was found, caused by it: a traceback shows each to its own cause."""
        if self.problems:
            several = len(self.problems) > 1
            raise Problems(self.problems) from (
                ExceptionGroup("everything that is wrong", self.problems) if several else self.problems[0]
            )
