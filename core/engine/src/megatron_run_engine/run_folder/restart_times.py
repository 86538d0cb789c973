"""The phases of a restart, from the death of a rank to the first new step, as the record of an attempt keeps them.

The launcher writes when the attempt before was lost, and rank 0 of the next one adds its own marks. torchrun does not
say when a rank died and when all had ended: a restart by it begins with the report in ``status.json``, and the phase
after that contains what nobody knows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from megatron_run_engine.run_folder.folder import RunFolder

#: The record in the folder of an attempt's logs.
NAME = "restart.json"
#: The phases in order, each by the mark that ends it. The first mark, ``died``, ends none.
PHASES: Mapping[str, str] = {
    "detected": "detection",
    "ended": "ranks_gone",
    "started": "processes",
    "joined": "join",
    "built": "build",
    "loaded": "load",
    "stepped": "first_step",
}


class LostAt(Protocol):
    """When a rank died, its launcher detected it, and the last rank had ended, in seconds since the epoch."""

    @property
    def died(self) -> float: ...  # noqa: D102  # above
    @property
    def detected(self) -> float: ...  # noqa: D102
    @property
    def ended(self) -> float: ...  # noqa: D102


def write_lost(folder: RunFolder, lost: LostAt) -> None:
    """Write when the attempt before this one was ``lost``."""
    _write(folder, {"died": lost.died, "detected": lost.detected, "ended": lost.ended})


def write_reported(folder: RunFolder, at: float) -> None:
    """Write when the attempt before this one reported a lost rank, which is all that is known of its end."""
    _write(folder, {"detected": at})


def _write(folder: RunFolder, marks: Mapping[str, float]) -> None:
    with suppress(OSError):  # a full disk is none of a restart's troubles
        folder.write_record(NAME, {"v": 1, "marks": marks})


class RestartTimes:
    """The marks of rank 0 in an attempt: it began as a process, and passes the others in their order.

    ``taken`` are the seconds of each phase, once a step is done, and ``unknown`` the phases that the next one contains.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._marks = {"started": process_start()}
        self.taken: Mapping[str, float] = {}
        self.unknown: Sequence[str] = ()

    def mark(self, name: str) -> None:
        """Note that the phase ends which ``name`` stands for."""
        self._marks[name] = time.time()

    def finish(self) -> None:
        """A step is done: record the phases, if the attempt follows one whose ranks were lost."""
        self.mark("stepped")
        before = (self._folder.files.read_json(f"{self._folder.records}/{NAME}") or {}).get("marks")
        if self._folder.rank or not isinstance(before, dict):
            return
        marks = {**before, **self._marks}
        self.taken = phases(marks)
        self.unknown = [phase for phase in PHASES.values() if phase not in self.taken]
        with suppress(OSError):
            record = {"v": 1, "marks": marks, "seconds": self.taken, "unknown": self.unknown}
            self._folder.write_record(NAME, record)

    def __str__(self) -> str:
        whole = sum(self.taken.values())
        each = ", ".join(f"{name.replace('_', ' ')} {seconds:.2f}" for name, seconds in self.taken.items())
        unknown = ", ".join(name.replace("_", " ") for name in self.unknown)
        since = "report of a lost rank" if unknown else "loss of a rank"
        line = f"{whole:.2f} s from the {since} to the first new step: {each}"
        return f"{line}; not known: {unknown}" if unknown else line


def phases(marks: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each phase between ``marks``, as far as they are there; never negative: clocks are set."""
    passed = [mark for mark in ("died", *PHASES) if mark in marks]
    return {PHASES[mark]: round(max(0.0, marks[mark] - marks[before]), 4) for before, mark in pairwise(passed)}


def process_start() -> float:
    """When this process began, in seconds since the epoch; now where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        ticks = float(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return booted + ticks / os.sysconf("SC_CLK_TCK")
    return time.time()
