"""Every reader of foreign bytes, with changed files: an answer or one of our errors, in time and within its memory.

A worker process reads many inputs, one after the other, with a limit of its address space and an alarm for each. Who
started it looks from outside, since a loop in C hears no alarm, and no Python survives a broken pointer. What gets a
new answer is itself changed again, so that an input can get past one check and reach the next.
"""

from __future__ import annotations

import contextlib
import io
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

from megatron_run.errors import Problems, RunError
from tests.campaigns import foreign_readers, readers  # noqa: F401  # they enter themselves into the table
from tests.campaigns.figures import Figures
from tests.campaigns.fuzzed import READERS, FuzzedReader
from tests.campaigns.mutations import changed, shrunk
from tests.campaigns.samples import write_samples
from tests.support.ranks import CONTEXT, start_server

#: Seconds that an answer may compute, those after which a worker is given up, and mebibytes that answers may need.
PROMPT, GIVEN_UP, MEMORY = 2.0, 60.0, 512
#: The most inputs that are changed again, and the longest of them in bytes.
_CORPUS, _LONGEST = 40, 1 << 16
#: The unchanging part of an answer.
_DETAIL = re.compile(r"[0-9]+|'[^']*'|\"[^\"]*\"|/\S+")


class TooLong(BaseException):
    """No answer came in time. Not an Exception, which a reader might take for its own."""


@dataclass
class Tally:
    """What came of the inputs of one reader: their number, how many were taken, and each fault with an input."""

    name: str
    tried: int = 0
    taken: int = 0
    slowest: float = 0.0
    grown: float = 0.0
    answers: set[str] = field(default_factory=set)
    faults: dict[str, bytes] = field(default_factory=dict)


class Fuzzed:
    """One reader under way: changes its file, reads it, and judges the answer."""

    def __init__(self, reader: FuzzedReader, samples: Path, work: Path) -> None:
        self._reader, self.tally = reader, Tally(reader.name)
        top = Path(reader.file).parts[0]
        shutil.copytree(samples / top, work / top, symlinks=True)
        self.path = work / reader.file
        self._whole = self.path.read_bytes()
        self.corpus = [reader.inner(self._whole)]
        with _silence():
            reader.read(self.path)  # what is loaded or computed once counts for no input
        self._before = _peak()

    def limit_memory(self) -> None:
        """From now on this process gets so much more and no more."""
        limit = _address_space() + (MEMORY << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))

    def attempt(self, content: bytes) -> str:
        """Read ``content``; what was wrong with the answer, in one line, or nothing."""
        self._place(content)
        self.tally.tried += 1
        start = time.process_time()
        try:
            with _alarm(), _silence():
                self._reader.read(self.path)
            self.tally.taken += 1
            answer, fault = "taken", ""
        except RunError as error:
            answer, fault = _DETAIL.sub("", f"{error.what} {error.why}"), _unfit(error)
        except TooLong as error:
            answer = fault = f"no answer within {PROMPT:g} s, {_place(error)}"
        except BaseException as error:
            answer = fault = f"{type(error).__name__}, {_place(error)}"
        self.tally.slowest = max(self.tally.slowest, time.process_time() - start)
        self.tally.grown = max(self.tally.grown, _peak() - self._before)
        new = answer not in self.tally.answers and not fault
        if new and len(self.corpus) < _CORPUS and len(content) <= _LONGEST:
            self.corpus.append(content)
        self.tally.answers.add(answer)
        return fault

    def run(self, inputs: Iterable[bytes]) -> Tally:
        """Read ``inputs``; those by which the inputs of faults become small come on top."""
        for content in inputs:
            fault = self.attempt(content)
            if fault and fault not in self.tally.faults:
                self.tally.faults[fault] = self._smallest(content, fault)
        return self.tally

    def _place(self, content: bytes) -> None:
        """Put ``content`` where it is read."""
        self.path.write_bytes(self._reader.pack(self._whole, content))

    def _smallest(self, content: bytes, fault: str) -> bytes:
        """The least of ``content`` that has ``fault``."""
        return shrunk(content, partial(self._has, fault))

    def _has(self, fault: str, content: bytes) -> bool:
        return self.attempt(content) == fault


#: The inputs of a reader, ``count`` of them from a seed on, which may follow from what it made of those before.
Inputs = Callable[[FuzzedReader, Sequence[bytes], int, int], Iterator[bytes]]


def drawn(reader: FuzzedReader, corpus: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Changes of ``corpus`` that are drawn at random."""
    for number in range(seed, seed + count):
        yield changed(number, corpus, reader.kind)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    """Within: an answer that computes for too long is ended. Its own time counts, not that of a busy machine."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, PROMPT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _unfit(error: RunError) -> str:
    """What is wrong with an error of ours: it is a line for each problem, and no command to a terminal."""
    for each in error.problems if isinstance(error, Problems) else (error,):
        if not str(each).strip():
            return f"an error that says nothing, {_place(error)}"
        if not str(each).replace("\n ", " ").isprintable():
            return f"an error of several lines or with control characters, {_place(error)}"
    return ""


def _place(error: BaseException) -> str:
    """The last line of ours, and the very last, that an error has passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "megatron_run" in frame.filename]
    places = {f"{Path(frame.filename).name}:{frame.lineno}": None for frame in (*ours[-1:], *frames[-1:])}
    return " to ".join(places)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def _work(
    pipe: Connection,
    tasks: Sequence[tuple[str, int]],
    samples: Path,
    work: Path,
    seed: int,
    inputs: Inputs,
    kind: type[Fuzzed],
) -> None:
    """A worker: says which reader it begins with, and what came of it."""
    sys.setrecursionlimit(1000)  # as a program's
    for number, (name, count) in enumerate(tasks):
        place = work / str(number)
        place.mkdir(parents=True)
        pipe.send(place / READERS[name].file)
        fuzzed = kind(READERS[name], samples, place)
        fuzzed.limit_memory()
        pipe.send(fuzzed.run(inputs(READERS[name], fuzzed.corpus, count, seed)))
        shutil.rmtree(place)


def _watched(
    tasks: Sequence[tuple[str, int]], samples: Path, work: Path, seed: int, inputs: Inputs, kind: type[Fuzzed]
) -> Iterator[Tally]:
    """The tallies of ``tasks``. A worker that dies or hangs has met a fault, and another one does what is left."""
    left = list(tasks)
    while left:
        reader, writer = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_work, args=(writer, left, samples, work / str(len(left)), seed, inputs, kind))
        process.start()
        writer.close()
        file, began, ended = Path(), time.time(), ""
        try:
            while left and not ended:
                if not reader.poll(1.0):
                    silent = time.time() - max(began, _written(file))
                    ended = f"no answer for {GIVEN_UP:g} s, in C" if silent > GIVEN_UP else ""
                elif isinstance(told := reader.recv(), Path):
                    file, began = told, time.time()
                else:
                    left.pop(0)
                    print(f"  {told.name}: {told.tried}", file=sys.stderr, flush=True)  # noqa: T201  # a command
                    yield told
        except EOFError:
            process.join()
            ended = f"it ended the process with {process.exitcode}"
        process.kill()
        process.join()
        if ended:
            yield Tally(left.pop(0)[0], 1, faults={ended: _left(file)})


def _left(file: Path) -> bytes:
    """How the ``file`` begins that a reader did not survive; it may be no file."""
    if not file.is_file():
        return b""
    with file.open("rb") as opened:
        return opened.read(_LONGEST)


def _written(file: Path) -> float:
    """When ``file`` was written last; the worker may be removing it."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def fuzz_all(folder: Path, count: int, seed: int, jobs: int, only: Sequence[str] = ()) -> list[Figures]:
    """About ``count`` inputs for all readers together, or for those named ``only``; a row for each group of them."""
    names = [name for name in only or READERS if READERS[name].share]
    whole = sum(READERS[name].share for name in names)
    tasks = [(name, max(1, round(count * READERS[name].share / whole))) for name in names]
    return read_all("changed at random", tasks, drawn, folder, seed, jobs)


def read_all(
    what: str,
    tasks: Sequence[tuple[str, int]],
    inputs: Inputs,
    folder: Path,
    seed: int,
    jobs: int,
    kind: type[Fuzzed] = Fuzzed,
) -> list[Figures]:
    """Let each reader of ``tasks``, as ``kind`` calls it, read so many of its ``inputs``; a row for each group."""
    start_server()
    write_samples(folder / "samples", {Path(READERS[name].file).parts[0] for name, _ in tasks})
    start = time.monotonic()

    def share(at: int) -> list[Tally]:
        return list(_watched(tasks[at::jobs], folder / "samples", folder / f"work-{at}", seed, inputs, kind))

    with ThreadPoolExecutor(jobs) as pool:
        tallies = [tally for each in pool.map(share, range(jobs)) for tally in each]
    seconds = time.monotonic() - start
    groups = dict.fromkeys(READERS[tally.name].group for tally in tallies)
    of_group = {group: [each for each in tallies if READERS[each.name].group == group] for group in groups}
    return [_figures(f"{what}: {group}", each, seconds) for group, each in of_group.items()]


def _figures(what: str, tallies: Sequence[Tally], seconds: float) -> Figures:
    tried, taken = sum(each.tried for each in tallies), sum(each.taken for each in tallies)
    faults = [
        f"{each.name}: {fault}, as {content[:300]!r}{' ...' if len(content) > 300 else ''}"
        for each in tallies
        for fault, content in each.faults.items()
    ]
    answers = sum(len(each.answers) for each in tallies)
    notes = [
        f"{len(tallies)} readers" if len(tallies) > 1 else "1 reader",
        f"{taken} were still right",
        f"{answers} different answers",
        f"the slowest took {max(each.slowest for each in tallies) * 1e3:.0f} ms",
        f"memory grew by {max(each.grown for each in tallies):.0f} MiB",
    ]
    return Figures(what, tried, faults, notes, seconds)
