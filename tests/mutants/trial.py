"""Tries mutants, each in a copy of the tree, with a time limit and no process left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from tests.mutants.catalogue import SOURCES, Mutant
from tests.support.leftovers import end_leftovers

#: ``no answer``: the tests did not come to an end in time, or could not be run, or fail without the mutant too.
Outcome = Literal["killed", "survived", "no answer"]
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".te-env", ".cosmic-ray", "dist", "runs", "__pycache__", ".*_cache")
#: The name of the first test that failed, in pytest's summary.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", re.MULTILINE)
_TESTS_FAILED, _NO_TESTS = 1, 5


class Result(NamedTuple):
    """How a trial ended: the outcome, the test that failed or what went wrong, and the seconds that it took."""

    outcome: Outcome
    by: str
    seconds: float


@dataclass
class Workshop:
    """A copy of the checkout ``origin`` in the empty folder ``place``: one mutant at a time is planted there.

    The copy comes before the installed packages on the import path, in child processes too; entry points are the
    installed ones. ``limit`` is in seconds, for the tests of one mutant. ``trusted``: all tests are known to pass
    without a mutant.
    """

    origin: Path
    place: Path
    limit: float
    trusted: bool = False
    _sound: dict[tuple[str, ...], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = self.place / "tree"
        shutil.copytree(self.origin, self.root, ignore=_LEFT_OUT, symlinks=True)

    def try_out(self, mutant: Mutant) -> Result:
        """Plant ``mutant`` and run its tests. A kill counts where they pass without it."""
        start = time.monotonic()
        with self._planted(mutant):
            code, output = self._run(mutant.tests)
        seconds = time.monotonic() - start
        if code == 0:
            return Result("survived", "", seconds)
        if code != _TESTS_FAILED:
            return Result("no answer", _why(code, self.limit), seconds)
        if wrong := self._wrong_without(mutant.tests):
            return Result("no answer", wrong, seconds)
        failed = _FAILED.search(output)
        return Result("killed", failed[1] if failed else "", seconds)

    @contextmanager
    def _planted(self, mutant: Mutant) -> Iterator[None]:
        file = mutant.source(self.root)
        sound = file.read_text(encoding="utf-8")
        try:
            _replace(file, mutant.planted(sound))
            yield
        finally:
            _replace(file, sound)

    def _wrong_without(self, tests: tuple[str, ...]) -> str:
        """Why ``tests`` say nothing: they do not pass on the sound tree. Empty where they do."""
        if self.trusted:
            return ""
        if tests not in self._sound:
            code, _ = self._run(tests)
            self._sound[tests] = "" if code == 0 else f"{_why(code, self.limit)} without the mutant"
        return self._sound[tests]

    def _run(self, tests: Sequence[str]) -> tuple[int | None, str]:
        """Run each of ``tests`` until one fails: pytest's exit code, None where the time was up, and its output."""
        deadline, output = time.monotonic() + self.limit, ""
        for test in tests:
            path, _, words = test.partition(" ")
            marked = ("-m", "nightly") if "nightly" in words.split() else ()
            code, said = self._pytest([path, *marked, *(("-k", words) if words else ())], deadline)
            output += said
            if code != 0:
                return code, output
        return 0, output

    def _pytest(self, words: Sequence[str], deadline: float) -> tuple[int | None, str]:
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *words],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(self.sources()), "MUTANT": mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        with process:
            try:
                output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return None, ""
            else:
                return process.returncode, output
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                end_leftovers(f"MUTANT={mark}", patience=0.0)  # ranks have sessions of their own

    def sources(self) -> list[str]:
        """The folders of the copy's import packages."""
        return [str(folder) for pattern in SOURCES for folder in sorted(self.root.glob(pattern))]


def _replace(file: Path, text: str) -> None:
    """Write ``file`` and forget its bytecode: two texts of one length in one second look alike to Python."""
    file.write_text(text, encoding="utf-8")
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def _why(code: int | None, limit: float) -> str:
    if code is None:
        return f"no end within {limit:g} s"
    return {_TESTS_FAILED: "tests fail", _NO_TESTS: "no test was chosen"}.get(code, f"pytest ended with {code}")
