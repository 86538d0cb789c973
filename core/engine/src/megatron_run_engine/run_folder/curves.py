"""Curves of a run of any length, read line by line in bounded memory, and thinned to some hundred points each."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from megatron_run.contracts.observer import STEP_CURVES
from megatron_run.drawing.curve import Curve, Thinning
from megatron_run.errors import InputError
from megatron_run.errors.wording import printable
from megatron_run.files.safe_folder import SafeFolder
from megatron_run_engine.run_folder.folder import LARGEST, row_of

#: The most curves of a file: each plugin may add some, and a stranger any number.
CURVES = 64
#: The most characters of a name.
LONGEST_NAME = 80
#: The most bytes of a line: far more than the numbers of a step have.
LONGEST = 1 << 20
#: The most evaluations that are read, the newest, and of how many splits or tasks.
EVALUATIONS, SPLITS = 20_000, 16
#: The most things noted of each sort: changes of values, skipped steps.
NOTED = 100
#: The greatest number of a step: a float counts exactly up to it.
_LAST = 1 << 53
#: How a line of ours begins, so that its step is known without the rest.
_HEAD = re.compile(rb'\{(?:"v": ?\d{1,9}, ?)?"step": ?(\d{1,15}), ?"')
#: Fields that are no curves.
_NO_CURVES = frozenset({"v", "step", "attempt", "time", "split", "skipped"})


@dataclass(frozen=True)
class Thinned:
    """The curves of a file by the names of their fields, and what else it tells.

    ``steps`` counts the lines that count, ``damaged`` those that cannot be read. ``begin`` and ``end`` are the times of
    the first and the last step, in seconds since the epoch. ``changes`` has steps, each with old and new value by key.
    """

    curves: Mapping[str, Curve] = field(default_factory=dict)
    steps: int = 0
    damaged: int = 0
    begin: float | None = None
    end: float | None = None
    microbatches: int | None = None
    changes: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    skipped: tuple[int, ...] = ()


def read_metrics(folder: Path) -> Thinned:
    """The curves in ``metrics.jsonl`` of the run in ``folder``; nothing where it has no such file.

    Of a step that was repeated the last line counts, and none of a step that a later line has undone: a run that went
    back to step 50 has no step 80 until it comes there again. Raises :class:`InputError` for an unreadable file.
    """
    ends = _ends(folder)
    gathered, damaged = _Gathered(), 0
    steps, before, attempt = 0, -1, -1
    for line in _lines(folder, "metrics.jsonl"):
        row = row_of(line)
        step = None if row is None else _step_of(row)
        if row is None or step is None:
            damaged += 1
            continue
        attempt += step <= before or attempt < 0
        before = step
        if attempt == len(ends):  # the run has gone back since its ends were found
            break
        if step < ends[attempt]:
            gathered.note(step, row)
            if "changes" not in row or "loss" in row:
                steps += 1
                gathered.add(step, row)
    return gathered.thinned(steps, damaged)


def _ends(folder: Path) -> array[int]:
    """For each stretch of growing steps in ``metrics.jsonl`` the step before which it counts."""
    begins, before = array("q"), -1
    for line in _lines(folder, "metrics.jsonl"):
        head = _HEAD.match(line)
        row = None if head else row_of(line)
        step = int(head[1]) if head else None if row is None else _step_of(row)
        if step is not None:
            if step <= before or not begins:
                begins.append(step)
            before = step
    end = _LAST + 1
    for index in reversed(range(len(begins))):  # in place: a stranger may begin anew in every line
        begins[index], end = end, min(end, begins[index])
    return begins


class _Gathered:
    """Curves and notes while a file is read."""

    def __init__(self) -> None:
        self._points: dict[str, Thinning] = {}
        self._times: list[float] = []
        self._microbatches: int | None = None
        self._changes: list[tuple[int, Mapping[str, Any]]] = []
        self._skipped: list[int] = []

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """The numbers of one step. Once there are many curves, only those of ours may still begin."""
        for name, value in row.items():
            if name in _NO_CURVES or not _is_number(value):
                continue
            there = self._points.get(name)
            if there is not None:
                there.add(step, float(value))
            elif (len(self._points) < CURVES and _is_name(name)) or name in STEP_CURVES.values():
                self._points[name] = Thinning(step, float(value))

    def note(self, step: int, row: Mapping[str, Any]) -> None:
        """Whatever else the line tells."""
        if _is_number(row.get("time")):
            self._times[1:] = [float(row["time"])]  # of the first step and the last
        microbatches = row.get("microbatches")
        if type(microbatches) is int and 0 < microbatches < _LAST:
            self._microbatches = max(microbatches, self._microbatches or 0)
        if row.get("skipped") is True and len(self._skipped) < NOTED:
            self._skipped.append(step)
        if isinstance(row.get("changes"), dict) and len(self._changes) < NOTED:
            self._changes.append((step, row["changes"]))

    def thinned(self, steps: int = 0, damaged: int = 0) -> Thinned:
        """All of it."""
        return Thinned(
            curves={name: points.curve() for name, points in self._points.items()},
            steps=steps,
            damaged=damaged,
            begin=self._times[0] if self._times else None,
            end=self._times[-1] if self._times else None,
            microbatches=self._microbatches,
            changes=tuple(self._changes),
            skipped=tuple(self._skipped),
        )


def read_evaluations(folder: Path) -> Mapping[str, Thinned]:
    """The curves in ``eval.jsonl`` of the run in ``folder`` by split or task. Raises :class:`InputError`."""
    rows: dict[tuple[str, int], Mapping[str, Any]] = {}
    for line in _lines(folder, "eval.jsonl"):
        row = row_of(line)
        step = None if row is None else _step_of(row)
        if row is not None and step is not None:
            key = (printable(str(row.get("split", "validation"))[:LONGEST_NAME]), step)
            rows.pop(key, None)  # the last one counts, and is the newest
            rows[key] = row
            if len(rows) > EVALUATIONS:
                del rows[next(iter(rows))]
    found: dict[str, _Gathered] = {}
    for (split, step), row in sorted(rows.items(), key=lambda each: each[0][1]):
        if split in found or len(found) < SPLITS:
            found.setdefault(split, _Gathered()).add(step, row)
    return {split: gathered.thinned() for split, gathered in found.items()}


def read_rows(folder: Path, name: str, last: int) -> list[Mapping[str, Any]]:
    """The ``last`` lines of JSON in the file ``name`` of the run in ``folder`` that are whole."""
    rows: list[Mapping[str, Any]] = []
    for line in _lines(folder, name):
        row = row_of(line)
        if row is not None:
            rows = [*rows[1 - last :], row] if last > 1 else [row]
    return rows


def _lines(folder: Path, name: str) -> Iterator[bytes]:
    """The whole lines of a file that others may have made, or be writing: as far as it now goes."""
    try:
        handle = SafeFolder(folder).open(name, os.O_RDONLY)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{folder / name} cannot be read", why=error.strerror or str(error)) from error
    with os.fdopen(handle, "rb") as file:
        left = min(os.fstat(handle).st_size, LARGEST)
        while left > 0 and (line := file.readline(min(left, LONGEST))):
            left -= len(line)
            if left or line.endswith(b"\n"):  # a killed run leaves half a line at the end
                yield line


def _step_of(row: Mapping[str, Any]) -> int | None:
    step = row.get("step")
    return step if type(step) is int and 0 <= step <= _LAST else None


def _is_name(name: str) -> bool:
    return name.isprintable() and len(name) <= LONGEST_NAME


def _is_number(value: object) -> bool:
    if type(value) is float:
        return isfinite(value)
    if type(value) is not int:
        return False
    try:
        return isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False
