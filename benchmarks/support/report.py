"""The form of the results of every benchmark: a heading that says what ran where, and tables of markdown."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.support.ranks import ROOT


def heading(title: str, command: Sequence[str]) -> Iterator[str]:
    """The title, the command, and what ran it: the first lines of the results."""
    yield f"# {title}\n"
    yield f"    {' '.join(command)}\n"
    yield f"{environment()}."


def environment() -> str:
    """Machine, torch, commit and date, in a line."""
    processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"))
    cores = f"{os.cpu_count()} cores of {processor[1] if processor else platform.machine()}"
    return f"{cores}, {platform.system()}, torch {version('torch')}, commit {revision()}, {datetime.now(UTC):%Y-%m-%d}"


def revision() -> str:
    """The commit that runs: that of the repository, or what an offline bundle says in its place."""
    if (ROOT / "REVISION").exists():
        return (ROOT / "REVISION").read_text("utf-8").strip()
    describe = ("git", "describe", "--always", "--dirty")
    return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Markdown, line by line: each row as soon as it is there."""
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
