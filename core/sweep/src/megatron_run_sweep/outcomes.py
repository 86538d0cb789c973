"""How far each run of a sweep is, and by which number it is compared: read from the runs' own files.

A run's folder may come from elsewhere: files are read below a ``SafeFolder``, the end of a long one only.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from megatron_run.files.safe_folder import SafeFolder
from megatron_run_sweep.metric import FILES, Metric, is_number_of
from megatron_run_sweep.record import Run, Sweep, run_name

#: The bytes that are read of the end of a file of lines.
_TAIL = 1 << 16
_STATES = frozenset({"starting", "running", "finished", "stopped", "failed"})
#: The characters that are kept of a run's last line.
_LINE = 1000
_STATUS, _LOCK = "status.json", ".lock"
#: What stands for the lock on file systems without flock; a process that was killed leaves it.
EXCLUSIVE = ".lock-exclusive"


@dataclass(frozen=True)
class Outcome:
    """A run of a sweep.

    ``state`` is ``waiting``, ``running``, ``finished``, ``stopped``, ``failed``, or ``killed`` for one whose process is
    gone without a word. ``metric`` is None where there is none yet, ``rate`` is in tokens a second.
    """

    run: str
    values: Mapping[str, str]
    state: str
    step: int
    metric: float | None
    rate: float | None
    exit_code: int | None = None
    message: str = ""
    #: The numbers that the last line has of those by which runs are compared, one that is not finite included.
    names: tuple[str, ...] = field(default=(), repr=False)

    @property
    def compared(self) -> float | None:
        """The metric by which it is compared; None of a run that failed: its last number was before that."""
        return None if self.state == "failed" else self.metric


def outcomes(sweep: Sweep, folder: Path, metric: Metric) -> list[Outcome]:
    """How far each run in ``folder`` is, in the order of the runs."""
    found = []
    for index, run in enumerate(sweep.runs):
        place = SafeFolder(folder / run_name(index))
        status = place.read_json(_STATUS) or {}
        lines, rates = _lines(place, FILES[metric.source]), _lines(place, FILES["train"])
        compared = [line for line in lines if _counts(line)]
        values = [_number(line.get(metric.name, _extra(line, metric.name))) for line in compared]
        speeds = [speed for line in rates if (speed := _number(line.get("tokens_per_s"))) is not None]
        found.append(
            Outcome(
                run_name(index),
                run.values,
                _state(status, run.exit_code, held=is_held(place)),
                int(_number(status.get("step")) or 0),
                values[-1] if values else None,
                median(speeds) if speeds else None,
                *_end(status, run),
                tuple(_named(compared[-1])) if compared else (),
            )
        )
    return found


def ranked(found: Sequence[Outcome], *, maximize: bool) -> list[Outcome]:
    """The best first; those that failed or have no number last, in the order of the runs."""
    sign = -1.0 if maximize else 1.0
    return sorted(found, key=lambda each: math.inf if each.compared is None else sign * each.compared)


def is_held(place: SafeFolder) -> bool:
    """Whether a process trains in the folder: it holds the lock there until it ends, however it does."""
    with suppress(OSError):
        handle = place.open(_LOCK, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without flock
            return os.path.lexists(place.path / EXCLUSIVE)
        finally:
            os.close(handle)
    return False


def _state(status: Mapping[str, Any], exit_code: int | None, *, held: bool) -> str:
    state = status.get("state")
    if not isinstance(state, str) or state not in _STATES:
        return "running" if held else "failed" if exit_code else "waiting"
    if state in ("starting", "running"):
        return "running" if held else "killed"
    return state


def _end(status: Mapping[str, Any], run: Run) -> tuple[int | None, str]:
    """Exit code and line of the last end: those in the run's folder, which no sweep need have started, else ours."""
    code, message = _number(status.get("exit_code")), status.get("message")
    known = run.exit_code if code is None else int(code)
    return known, message[:_LINE] if isinstance(message, str) and message else run.message


def _counts(line: Mapping[str, Any]) -> bool:
    """Whether runs are compared by ``line``: one of a step, or of the validation split."""
    return line.get("split") in (None, "validation")


def _extra(line: Mapping[str, Any], name: str) -> Any:
    extra = line.get("extra")
    return extra.get(name) if isinstance(extra, dict) else None


def _named(line: Mapping[str, Any]) -> Iterator[str]:
    extra = line.get("extra")
    for names in (line, extra if isinstance(extra, dict) else {}):
        yield from (name for name, value in names.items() if _may_be_number(value) and is_number_of(name))


def _may_be_number(value: object) -> bool:
    """Also None, as which a number is written that a step has not."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(value: object) -> float | None:
    """``value`` where it is a finite number."""
    is_number = value is not None and _may_be_number(value)
    with suppress(OverflowError):
        return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]  # it is a number
    return None


def _lines(place: SafeFolder, name: str) -> list[dict[str, Any]]:
    """The last whole lines of a file of lines, as far as they are mappings."""
    try:
        with os.fdopen(place.open(name, os.O_RDONLY), "rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - _TAIL)
            file.seek(start)
            texts = file.read(_TAIL).split(b"\n")
    except OSError:
        return []
    found = []
    for text in texts[1:] if start else texts:
        with suppress(ValueError, RecursionError):  # the last may be half-written
            found.append(json.loads(text))
    return [each for each in found if isinstance(each, dict)]
