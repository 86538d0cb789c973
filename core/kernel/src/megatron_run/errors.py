"""Errors for users, in four parts: what went wrong, why, where it came from, what to type. Each has an exit code.

Every mistake of a user raises one of these, and is printed as one line; only a bug shows a traceback.
:class:`Findings` collects them, so that one pass reports all.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from enum import IntEnum
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from shlex import quote


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


#: In torch's error where the host has no memory, and in NCCL's where InfiniBand's library gets none: other errors have
#: the system's words for it too.
_ALLOCATOR, _VERBS = "DefaultCPUAllocator", "ibv_"


def system_limit(error: BaseException) -> RunError | None:
    """The message where ``error`` is a limit of the machine or of the shell, else None."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error) if isinstance(error, RuntimeError) else ""  # torch, gloo and Python's own threads have no numbers
    if number in (errno.EMFILE, errno.ENFILE) or os.strerror(errno.EMFILE) in text:
        return _too_few("files are open", resource.RLIMIT_NOFILE, "ulimit -n")
    if number == errno.EAGAIN or os.strerror(errno.EAGAIN) in text or "can't start new thread" in text:
        return _too_few("processes or threads run", resource.RLIMIT_NPROC, "ulimit -u")
    refused = isinstance(error, MemoryError) or _ALLOCATOR in text
    if refused or number == errno.ENOMEM:
        why = next(iter(str(error).splitlines()), "") if refused else ""  # how much was asked for
        return OutOfMemoryError("the host ran out of memory", why=why, fix="free some, or allow more with ulimit -v")
    if _VERBS in text and os.strerror(errno.ENOMEM) in text:
        why = next(line for line in text.splitlines() if _VERBS in line)
        return InputError("the network may lock too little memory", why=why, fix="allow more: ulimit -l unlimited")
    if number == errno.ENAMETOOLONG:
        return InputError(f"a name is too long for a file: {str(getattr(error, 'filename', ''))[:LONGEST_WORD]}...")
    return None


def _too_few(what: str, limit: int, command: str) -> InputError:
    allowed = resource.getrlimit(limit)[0]
    why = f"{command} allows {allowed}" if allowed != resource.RLIM_INFINITY else "the machine allows no more"
    return InputError(f"too many {what}", why=why, fix=f"allow more: {command} 4096")


#: The distribution that brings torch, and the modules that come with it.
ENGINE = "megatron-run-engine"
ENGINE_MODULES = frozenset({"megatron_run_engine", "numpy", "safetensors", "tokenizers", "torch"})


def check_engine(cause: BaseException, what: str, origin: str = "") -> None:
    """Raise :class:`EngineMissingError` with ``what`` when ``cause`` is the failed import of a module of the engine."""
    missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
    if missing and missing.partition(".")[0] in ENGINE_MODULES:
        why = f"it needs the engine, and there is no module {missing!r}"
        raise EngineMissingError(what, why=why, origin=origin, fix=f"type: {how_to_install(ENGINE)}") from cause


def how_to_install(distribution: str, kernel: Path = Path(__file__)) -> str:
    """The command that brings a first-party ``distribution``; ``kernel`` is a module of the kernel that runs.

    A kernel that runs from a checkout asks for the checkout's other folders: no index may have that version. Of two
    folders the engine's comes first, since pip looks on the index for what a plugin needs and does not find installed.
    """
    source = kernel.resolve().parent
    in_checkout = source.match("core/kernel/src/megatron_run")
    root = source.parents[3] if in_checkout else source
    members = _members(root) if in_checkout else iter(())
    folder = next((each for each in members if _distribution_of(each, root) == distribution), None)
    if folder is None:
        return f"pip install {distribution}"
    folders = [folder]
    needs_engine = f'"{ENGINE}' in (folder / "pyproject.toml").read_text(encoding="utf-8")
    if needs_engine and find_spec("megatron_run_engine") is None:
        folders.insert(0, root / "core/engine")
    here = Path.cwd() == root  # pip takes a path for one only with a leading ./ or /
    words = [f"./{each.relative_to(root)}" if here else quote(str(each)) for each in folders]
    return f"pip install {' '.join(f'-e {word}' for word in words)}"


def _members(root: Path) -> Iterator[Path]:
    """The folders of a checkout that hold a distribution."""
    for pattern in ("core/*/pyproject.toml", "cli/pyproject.toml", "plugins/*/*/pyproject.toml"):
        yield from (file.parent for file in sorted(root.glob(pattern)))


def _distribution_of(folder: Path, root: Path) -> str:
    """``plugins/schedule/gpipe`` -> ``megatron-run-schedule-gpipe``."""
    names = folder.relative_to(root).parts
    return "-".join(("megatron-run", *(names[1:] if len(names) > 1 else names)))


class ToldToEnd(BaseException):
    """The exception of a handler of a signal. Not an Exception, which a library might take for its own."""


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


def printable(text: str) -> str:
    """``text`` with what a terminal would obey, or cannot show, escaped as Python does.

    Names in a file of somebody else's end up in messages. A line's end stays where an indented line follows it: those
    are tables of ours.
    """
    if text.isprintable():
        return text
    following = (*text[1:], "")
    kept = (each.isprintable() or (each, after) == ("\n", " ") for each, after in zip(text, following, strict=True))
    return "".join(each if keep else ascii(each)[1:-1] for each, keep in zip(text, kept, strict=True))


#: Characters of a word that is compared with others: the time grows with the product of two lengths.
LONGEST_WORD = 200


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"did you mean 'interleaved'?"``, or an empty string if no known word is similar."""
    if len(word) > LONGEST_WORD:
        return ""
    near = get_close_matches(word, [each for each in known if len(each) <= LONGEST_WORD], n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else ""


def near_path(path: Path) -> str:
    """:func:`did_you_mean` for the first missing part of ``path``, among what is beside it; endings do not count.

    A link whose target is gone is not there either.
    """
    try:
        missing = next(each for each in (*reversed(path.parents), path) if not each.exists())
        there = [each for each in sorted(missing.parent.iterdir()) if each.exists()]
        alike = [each.name for each in there if did_you_mean(missing.stem, [each.stem])]
        return did_you_mean(missing.name, alike)
    except (StopIteration, OSError):
        return ""


#: NAME or ORGANISATION/NAME, as models of the Hugging Face Hub are called; the part before a slash.
_HUB_NAME = re.compile(r"(?:([A-Za-z0-9][\w-]*)/)?[A-Za-z0-9][\w.-]*")


def from_hub(path: Path) -> str:
    """How to get the folder ``path``, which does not exist, if it may be a name on the Hub; else an empty string."""
    near = path
    with suppress(OSError, ValueError):  # the current folder was removed; ``path`` lies elsewhere
        near = path.relative_to(Path.cwd())
    name = _HUB_NAME.fullmatch(str(near))
    if name is None or near.suffix[1:].isalpha() or (name[1] and (name[1] == "runs" or Path(name[1]).exists())):
        return ""
    return (
        f"nothing is downloaded here: if {near} is a model of the Hugging Face Hub, "
        f"type: hf download {near} --local-dir {near} (of pip install huggingface_hub)"
    )


def taken(what: object, option: str = "") -> InputError:
    """The refusal of every command where ``what`` is there already.

    ``option`` is what named it, in a command that has ``--overwrite`` too; without one the command makes a new folder.
    """
    if not option:
        return InputError(f"{what} exists", why="nothing is overwritten", fix="name a new folder")
    return InputError(f"{what} exists", fix=f"name another {option}, or add --overwrite")


def refuse_taken(path: Path, option: str, *, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """Raise :func:`taken` for a file, unless it may be replaced: before work that would be for nothing.

    None of the command's ``inputs`` may ever be. Pictures and the schema, which nobody edits, are made anew without
    asking. A pipe or the terminal is written to; for a folder writing it fails.
    """
    place = os.path.realpath(path)  # of a link to an input too
    if any(os.path.realpath(each) == place for each in inputs):
        raise InputError(f"{path} is an input too", fix=f"name another {option}")
    if path.is_file() and not overwrite:
        raise taken(path, option)


def advice(*parts: str) -> str:
    """The non-empty parts as one line: ``"did you mean '1f1b'? installed: sequential, 1f1b"``."""
    return "; ".join(filter(None, parts)).replace("?; ", "? ")


def plural(number: int, word: str) -> str:
    """``"1 stage"``, ``"2 stages"``, ``"2 microbatches"``."""
    return f"{number} {word}{'' if number == 1 else 'es' if word.endswith('ch') else 's'}"


def nearest(number: int, others: Iterable[int]) -> str:
    """The one of ``others`` next below ``number`` and the one next above: ``"4 or 8"``; empty without any."""
    ascending = sorted(others)
    below, above = ([each for each in ascending if each < number], [each for each in ascending if each > number])
    return " or ".join(map(str, below[-1:] + above[:1]))


def nearest_multiples(number: int, factor: int) -> str:
    """The multiples of ``factor`` below and above ``number``, which is not one: ``"96 or 104"``; never 0."""
    below = number // factor * factor
    return nearest(number, [below or factor, below + factor])


def nearest_divisors(number: int, wanted: int, factor: int = 1) -> str:
    """The divisors of ``number`` below and above ``wanted``, which is not one: ``"4 or 6"``.

    They are multiples of ``factor``, if it divides ``number``. Of a number beyond 10^12 they are the nearest that have,
    or leave, a factor of at most 10^6.
    """
    step = 1 if number % factor else factor
    rest = number // step
    small = [divisor for divisor in range(1, min(isqrt(rest), 10**6) + 1) if rest % divisor == 0]
    return nearest(wanted, [step * divisor for each in small for divisor in (each, rest // each)])


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
