"""A page that is a walk: the files it quotes and the commands of its ``shellsession`` blocks, one after the other.

Unlike a console (:mod:`tests.docs.consoles`), whose commands stand alone, each step of a walk finds what the steps
before it left: all run by the shell, in one folder and one environment of their own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from tests.docs.consoles import Shown, shown
from tests.docs.quoted import pages, quotes
from tests.support.scratch import LEAKS, Scratch

#: Where the page says that it happens; a walk prints its folder in full.
THERE = "~/walk"

_STEP = re.compile(r"^(?:<!-- file: \S+ -->\n\n```.*?^```$|```shellsession\n.*?^```$)", re.DOTALL | re.MULTILINE)
#: What differs between two runs: the run folder's name, durations, how far a run came before Ctrl-C, and the rate in
#: the last column of a table.
_VARIES = re.compile(
    r"\d{8}-\d{6}-[0-9a-f]{4}|(?<= in )[\d.]+(?= ?s$)|(?<=SIGINT: step )\d+|(?<=  )[\d,]+$", re.MULTILINE
)
_PRESSED = "^C\n"
_LIMIT = 300  # seconds for a command, many times what it takes


@dataclass(frozen=True)
class File:
    """A file that the page shows, to be saved under its own name."""

    name: str
    text: str


def steps(page: str) -> Iterator[File | Shown]:
    """The steps of ``page`` in order."""
    for match in _STEP.finditer(page):
        if match[0].startswith("```"):
            yield from shown(match[0].replace("```shellsession", "```console", 1))
        else:
            yield from (File(Path(path).name, f"{code}\n") for path, code in quotes(match[0]).items())


class Walker:
    """Takes the steps in ``folder``, with ``megatron-run``, ``pip``, ``pytest`` and ``python`` of a new environment.

    pip works without a network: what it needs is behind the environment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "walk"
        self.folder.mkdir()
        scratch = Scratch(folder / "env")
        bin_folder = scratch.python.parent
        _script(bin_folder / "megatron-run", f"exec {scratch.python} -m megatron_run_cli")
        _script(bin_folder / "pytest", f"exec {scratch.python} -m pytest -p no:cacheprovider")
        _script(bin_folder / "pip", f"exec {sys.executable} -m pip --python {scratch.python}")
        clean = {
            n: v for n, v in os.environ.items() if n not in LEAKS and not n.startswith(("MEGATRON_RUN_", "PYTEST"))
        }
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self._environment = {**clean, **offline, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}

    def take(self, step: File | Shown) -> str | None:
        """Do what the page says; what a command printed where the page shows something else, else None."""
        if isinstance(step, File):
            (self.folder / step.name).write_text(step.text, encoding="utf-8")
            return None
        printed = self._run(step)
        agrees = Shown(step.command, _settled(step.output.replace(_PRESSED, ""))).agrees(_settled(printed))
        return None if agrees else printed

    def _run(self, step: Shown) -> str:
        """What the command prints. It has a process group of its own, which gets SIGINT as a terminal's does."""
        before, press, _ = step.output.partition(_PRESSED)
        waits_for = Shown(step.command, _settled(before)) if press else None
        printed = ""
        with (
            _heard(),
            subprocess.Popen(
                ["sh", "-c", step.command],
                cwd=self.folder,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            ) as process,
        ):
            stuck = Timer(_LIMIT, os.killpg, (process.pid, signal.SIGKILL))
            stuck.start()
            try:
                assert process.stdout
                for line in process.stdout:
                    printed += line.replace(str(self.folder), THERE)
                    if waits_for and waits_for.agrees(_settled(printed)):
                        os.killpg(process.pid, signal.SIGINT)
                        waits_for = None
            finally:
                stuck.cancel()
        return printed


@contextmanager
def _heard() -> Iterator[None]:
    """What starts meanwhile hears SIGINT, which it would ignore if these tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _script(file: Path, line: str) -> None:
    file.write_text(f'#!/bin/sh\n{line} "$@"\n', encoding="utf-8")
    file.chmod(0o755)


def _settled(text: str) -> str:
    return _VARIES.sub("#", text)


def refreshed(page: str) -> str:
    """``page`` with every step as it prints now, save where it leaves lines out with ``...`` or shows no less."""
    with tempfile.TemporaryDirectory() as folder:
        walker = Walker(Path(folder))
        for step in list(steps(page)):
            printed = walker.take(step)
            if isinstance(step, Shown) and printed is not None and "...\n" not in step.output:
                shows = f"$ {step.command}\n"
                page = page.replace(shows + step.output, shows + printed, 1)
    return page


if __name__ == "__main__":
    for file in pages():
        text = file.read_text(encoding="utf-8")
        if "```shellsession\n" in text:
            file.write_text(refreshed(text), encoding="utf-8")
