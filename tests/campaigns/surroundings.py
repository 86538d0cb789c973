"""Machines that misbehave: disks that refuse, observers that block or raise, limits, and many runs at once."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from megatron_run.errors import CheckpointError, InputError
from megatron_run.planning import resolve
from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.run_folder import open_run_folder
from tests.campaigns.figures import Figures, campaign, some
from tests.support.forked import learned, run_forked, tiny
from tests.support.saved_steps import random_state, save_alone

#: How a disk refuses, and the calls in which it does; a close that fails has closed.
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES)
CALLS = ("mkdir", "unlink", "rmdir", "rename", "replace", "open", "write", "fsync", "close", "ftruncate")


@contextmanager
def failing(call: str, nth: int, number: int) -> Iterator[list[int]]:
    """Within: the ``nth`` use of ``os.<call>`` in this process raises ``number``; yields the uses so far."""
    real, uses = getattr(os, call), [0]

    def used(*arguments: Any, **options: Any) -> Any:
        if call == "open" and not (len(arguments) > 1 and arguments[1] & os.O_CREAT):
            return real(*arguments, **options)  # what is only read is the fuzzer's
        uses[0] += 1
        if uses[0] == nth:
            if call == "close":
                real(*arguments)
            raise OSError(number, os.strerror(number), str(arguments[0]))
        return real(*arguments, **options)

    with mock.patch.object(os, call, used):
        yield uses


class Refusal(NamedTuple):
    """The ``nth`` use of ``os.<call>`` raises the error ``number``."""

    call: str
    nth: int
    number: int

    def __str__(self) -> str:
        return f"{self.call} {self.nth} {errno.errorcode[self.number]}"

    def faults_of(self, act: Callable[[], object], error: type[Exception]) -> list[str]:
        """Do ``act`` with this refusal: it succeeds, or raises ``error`` with one line that quotes the system's."""
        try:
            with failing(*self):
                act()
        except error as raised:
            said = str(raised)
            if not (said.isprintable() and os.strerror(self.number) in said):
                return [f"{self}: it said {said!r}"]
        return []


def _refusals(act: Callable[[], object], reset: Callable[[], object]) -> list[Refusal]:
    """Every use of every call that ``act`` makes, with each error."""
    found = []
    for call in CALLS:
        reset()
        with failing(call, 0, 0) as uses:
            act()
        found += [Refusal(call, nth, number) for nth in range(1, uses[0] + 1) for number in ERRORS]
    return found


def refused_saves(folder: Path, share: float = 1.0) -> Figures:
    """A call of a save fails: it says so in one line or has succeeded; what was saved stays; the next save works."""
    states = [random_state(seed, 2) for seed in range(5)]
    home = folder / "checkpoints"

    def reset() -> None:
        shutil.rmtree(home, ignore_errors=True)
        for step in (1, 2):
            save_alone(home, step, states[step])

    def save() -> object:
        return save_alone(home, 3, states[3])

    refusals = _refusals(save, reset)

    def trial(index: int) -> Sequence[str]:
        reset()
        faults = refusals[index].faults_of(save, CheckpointError)
        checkpoints = Checkpoints(home)
        newest = checkpoints.newest()
        if newest not in (2, 3):
            return [f"{refusals[index]}: the newest step is {newest}"]
        checkpoints.verify(newest)
        save_alone(home, 4, states[4]).verify(4)
        return faults

    what = "a disk that refuses one call of a save: one line, what was saved stays, the next save works"
    figures = campaign(what, trial, some(len(refusals), share))
    figures.notes.append(f"{len(refusals) // len(ERRORS)} calls, {len(ERRORS)} errors")
    return figures


def refused_starts(folder: Path, share: float = 1.0) -> Figures:
    """A call of the launcher in its run folder fails: one line or a start; the same command goes on."""
    home = folder / "run"
    run = resolve(tiny(home, nproc=1))

    def reset() -> None:
        shutil.rmtree(home, ignore_errors=True)

    def start() -> object:
        return open_run_folder(run).lock.release()  # type: ignore[func-returns-value]

    refusals = _refusals(start, reset)

    def trial(index: int) -> Sequence[str]:
        reset()
        faults = refusals[index].faults_of(start, InputError)
        open_run_folder(run).lock.release()
        return faults

    what = "a disk that refuses one call of a start: one line, and the same command goes on"
    return campaign(what, trial, some(len(refusals), share))


#: What an observer does in a hook, and how a run may end then.
MISDEEDS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "raises": ("raise KeyError('mine')", (0,)),
    "runs out of memory": ("raise MemoryError", (0, 7)),
    "recurses": ("self.{hook}(*_)", (0,)),
    "exits": ("raise SystemExit(3)", (0,)),
    "leaves": ("__import__('os')._exit(0)", (4,)),
    "blocks": ("__import__('time').sleep(3600)", (4,)),
    "stops itself": ("__import__('os').kill(__import__('os').getpid(), 19)", (4,)),
}
HOOKS = ("on_train_start", "on_step_end", "on_eval_end", "on_checkpoint", "on_train_end")
OBSERVER = """
from megatron_run.contracts import Observer, PluginInfo
from megatron_run.hookspecs import hookimpl


class Odd(Observer):
    def {hook}(self, *_):
        {deed}


@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("observer", "odd")


@hookimpl
def megatron_run_create_observer():
    return Odd()
"""


def odd_observers(folder: Path, share: float = 1.0, jobs: int = 1) -> Figures:
    """An observer misbehaves in one hook of rank 0 of two: training goes on, or the rank is named in one line."""
    cases = list(product(HOOKS, MISDEEDS))

    def trial(index: int) -> Sequence[str]:
        hook, name = cases[index]
        deed, codes = MISDEEDS[name]
        home = folder / str(index)
        home.mkdir()
        (home / "odd.py").write_text(OBSERVER.format(hook=hook, deed=deed.format(hook=hook)))
        values = {"run.timeout": 4.0, "eval.interval": 2, "observer.use": f"jsonl,{home / 'odd.py'}"}
        ended = run_forked(tiny(home / "run", values, nproc=2), timeout=180.0)
        faults = [] if ended.code in codes else [f"exit code {ended.code}: {ended.message}"]
        faults += [f"it said {ended.message!r}"] if "\n" in ended.message else []
        faults += ["steps are missing"] if not ended.code and len(learned(home / "run")) != 4 else []
        faults += ["rank 0 is not named"] if ended.code == 4 and "rank 0" not in ended.message else []
        return [f"{hook} {name}: {each}" for each in faults]

    what = "an observer that raises, blocks or leaves: training goes on, or rank 0 is named"
    return campaign(what, trial, some(len(cases), share), jobs)


SLOW = """
import os, time


def fsync(handle, real=getattr(os.fsync, "real", os.fsync)):  # launcher and rank both import this
    time.sleep({seconds})
    real(handle)


fsync.real = fsync.__defaults__[0]
os.fsync = fsync
"""


def slow_disks(folder: Path, share: float = 1.0, jobs: int = 1) -> Figures:
    """Every fsync takes a part of the limit, and there is no alarm; or longer, and rank 0 is named with the save."""
    limit = 4.0
    cases = list(product((0.3, 0.6, 5.0), ("false", "true")))

    def trial(index: int) -> Sequence[str]:
        part, behind = cases[index]
        home = folder / str(index)
        home.mkdir()
        slow = SLOW.format(seconds=part * limit)
        (home / "odd.py").write_text(slow + OBSERVER.format(hook="on_train_end", deed="pass"))
        values = {"run.timeout": limit, "checkpoint.async_save": behind, "observer.use": f"jsonl,{home / 'odd.py'}"}
        ended = run_forked(tiny(home / "run", values, nproc=2), timeout=300.0)
        if part < 1:
            fits = ended.code == 0 and len(learned(home / "run")) == 4
        else:
            fits = ended.code == 4 and "rank 0" in ended.message and "save" in ended.message
        return [] if fits else [f"{part} of the limit, async {behind}: exit code {ended.code}: {ended.message}"]

    what = "a disk on which every fsync is slow: no alarm; slower than the limit: rank 0 and its save are named"
    return campaign(what, trial, some(len(cases), share), jobs)


class Place(NamedTuple):
    """Where the command is typed: after ``shell`` commands, with ``variables``, and by a user who is not root."""

    shell: str
    variables: Mapping[str, str] = {}
    plain: bool = False


#: What a shell limits before the command, and variables and folders that lead nowhere.
PLACES: Mapping[str, Place] = {
    **{f"{count} open files": Place(f"ulimit -n {count}") for count in (5, 8, 12, 16, 32, 64, 128)},
    **{f"{size} MB of memory": Place(f"ulimit -v {size * 1000}") for size in (100, 500, 1000, 2000, 4000)},
    **{f"files of {size} kB": Place(f"ulimit -f {size}") for size in (0, 1, 20)},
    **{f"{seconds} s of CPU": Place(f"ulimit -t {seconds}") for seconds in (1, 4)},
    **{f"{count} processes": Place(f"ulimit -u {count}", plain=True) for count in (1, 2, 3, 4, 8, 32)},
    "no TMPDIR": Place("true", {"TMPDIR": "/nowhere/at/all"}),
    "a TMPDIR that is a file": Place("true", {"TMPDIR": "/etc/passwd"}),
    "a read-only TMPDIR": Place("true", {"TMPDIR": "/proc"}),
    "no HOME": Place("true", {"HOME": "/nowhere/at/all"}),
    "a read-only HOME": Place("mkdir -m 500 home", {"HOME": "home"}, plain=True),
    "a cache that is a file": Place("true", {"XDG_CACHE_HOME": "/etc/passwd"}),
    "a read-only folder": Place("cd /proc"),
    "a read-only run folder": Place("mkdir -m 500 run", plain=True),
}
#: Exit codes of a shell for what a signal ended: of memory, CPU and the length of files.
KILLED = (134, 137, 139, 152, 153)
#: How root becomes somebody else, who still reads what this checkout's interpreter is made of.
AS_NOBODY = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)


def limited(folder: Path, share: float = 1.0) -> Figures:
    """The command under limits of the shell: it trains, or says why not in a line; it never hangs."""
    cases = list(PLACES)

    def trial(index: int) -> Sequence[str]:
        shell, variables, plain = PLACES[cases[index]]
        home = folder / str(index)
        home.mkdir(mode=0o777)
        home.chmod(0o777)
        command = f"{shell} && exec {sys.executable} -P -m megatron_run_cli preset:tiny --nproc 2 --set train.steps=2"
        place = () if shell.startswith("cd") else ("--set", "run.folder=run")
        words = " ".join((command, "--set eval.batches=1", *place))
        user = AS_NOBODY if plain and os.geteuid() == 0 else ()
        ran = subprocess.run(
            [*user, "/bin/bash", "-c", words],
            cwd=home, env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        ours = [line for line in ran.stderr.splitlines() if line.startswith("megatron-run: ")]
        if ran.returncode in (0, 2, 4, 5, 7):
            well = ran.returncode == 0 or (ours and "Traceback" not in ran.stderr)
        else:  # there was no room to say anything: Python itself could not start, or the system ended it
            well = ran.returncode in KILLED or "megatron_run" not in ran.stderr
        return [] if well else [f"{cases[index]}: exit code {ran.returncode}: {ran.stderr.strip()[-300:]}"]

    what = "limits of files, memory, CPU and processes; no TMPDIR or HOME, read-only folders: trained, or one line"
    return campaign(what, trial, some(len(cases), share))


def together(folder: Path, count: int = 20) -> list[Figures]:
    """So many runs at once: in a tree of folders all train, in one folder one trains and the others are refused."""

    def tree(index: int) -> Sequence[str]:
        ended = run_forked(tiny(folder / "tree" / str(index), nproc=1), timeout=600.0)
        return [] if ended.code == 0 else [f"run {index}: exit code {ended.code}: {ended.message}"]

    def one(index: int) -> Sequence[str]:
        ended = run_forked(tiny(folder / "one", nproc=1), timeout=600.0)
        fits = ended.code == 0 or (ended.code == 2 and "is in use" in ended.message)
        return [] if fits else [f"run {index}: exit code {ended.code}: {ended.message}"]

    trees = campaign(f"{count} runs started at once in one tree of folders: all train", tree, range(count), count)
    ones = campaign(
        f"{count} runs started at once in one folder: one trains, no record is lost", one, range(count), count
    )
    if sorted(learned(folder / "one")) != [1, 2, 3, 4]:
        ones.faults.append(f"steps {sorted(learned(folder / 'one'))} were trained")
    return [trees, ones]


def removed_while_loaded(folder: Path, count: int, seed: int) -> Figures:
    """A step that a training retires while somebody reads it: a whole step or one line, never anything else."""
    state = random_state(seed, tensors=4)

    def trial(index: int) -> Sequence[str]:
        home = folder / str(index)
        checkpoints = save_alone(home, 1, state)
        gone = threading.Timer(index % 25 * 2e-4, shutil.rmtree, (home / "step1",), {"ignore_errors": True})
        gone.start()
        try:
            manifest = checkpoints.verify(1)
            reader = Reader(checkpoints.folder(1), manifest)
            for name, shape in reader.shapes().items():
                reader.read(name, "master", (0,) * len(shape), shape)
        except CheckpointError as error:
            if not str(error).isprintable():
                return [f"it said {error}"]
        finally:
            gone.join()
            shutil.rmtree(home, ignore_errors=True)
        return []

    return campaign("a step that is removed while it is read: read whole, or one line", trial, range(count))


def surroundings(folder: Path, seed: int, jobs: int, share: float) -> list[Figures]:
    """All of these."""

    def place(name: str) -> Path:
        (folder / name).mkdir()
        return folder / name

    with ExitStack() as stack:
        with suppress(ValueError, OSError):
            soft = resource.getrlimit(resource.RLIMIT_CORE)
            resource.setrlimit(resource.RLIMIT_CORE, (0, soft[1]))
            stack.callback(resource.setrlimit, resource.RLIMIT_CORE, soft)
        return [
            refused_saves(place("saves"), share),
            refused_starts(place("starts"), share),
            removed_while_loaded(place("removed"), max(1, round(200 * share)), seed),
            odd_observers(place("observers"), share, jobs),
            slow_disks(place("slow-disks"), share, jobs),
            *together(place("together"), max(2, round(20 * share))),
            limited(place("limits"), share),
        ]
