"""observer=jsonl: steps in metrics.jsonl, evaluations in eval.jsonl, samples in samples.jsonl.

Each line is one strict JSON object.
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any, BinaryIO

from megatron_run.contracts import EvalMetrics, Observer, PluginInfo, RunSummary, StepMetrics
from megatron_run.files.safe_folder import SafeFolder
from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

#: Version of the lines. It is raised when the meaning of a field changes.
VERSION = 1
#: Bytes of a line that a run may have begun, far more than any has: what somebody else left may be a hole of 40 GB.
LONGEST_LINE = 1 << 24


class JsonLines(Observer):
    """Appends to its files and never changes a line. If a step was repeated, its last line counts.

    So every line has a step's numbers; the first step after other values has ``resumed`` and ``changes`` beside them.
    """

    def __init__(self) -> None:
        self._attempt = self._step = 0
        self._samples: Path | None = None
        self._begun: dict[str, Any] = {}
        self._metrics: LineFile | None = None
        self._eval: LineFile | None = None

    def on_train_start(self, run: RunSummary) -> None:
        """Open the files of steps and evaluations in the run folder."""
        self._attempt, self._step = run.attempt, run.first_step - 1
        self._samples = run.folder / "samples.jsonl"  # made by the first one: most runs have none
        self._metrics = LineFile(run.folder / "metrics.jsonl")
        self._eval = LineFile(run.folder / "eval.jsonl")
        self._begun = {"resumed": str(run.resumed), "changes": run.changes} if run.changes else {}

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Append a line with v, step, attempt and the fields of :class:`StepMetrics`."""
        numbers = asdict(metrics)
        self._step = metrics.step
        head = {"v": VERSION, "step": numbers.pop("step"), "attempt": self._attempt}
        _opened(self._metrics).append({**head, **numbers, **self._begun})
        self._begun = {}

    def on_eval_end(self, metrics: EvalMetrics) -> None:
        """Append a line with the fields of :class:`EvalMetrics`."""
        _opened(self._eval).append(_eval_line(metrics))

    def on_later_eval(self, folder: Path, metrics: EvalMetrics) -> None:
        """Append a line as for an evaluation in training."""
        file = LineFile(folder / "eval.jsonl")
        file.append(_eval_line(metrics))
        file.close()

    def on_sample(self, text: str) -> None:
        """Append a line with the step, the attempt and the text."""
        if self._samples is not None:
            file = LineFile(self._samples)
            file.append({"step": self._step, "attempt": self._attempt, "text": text})
            file.close()

    def on_error(self, error: BaseException) -> None:
        """Close the files."""
        self._close()

    def on_train_end(self, reason: str) -> None:
        """Close the files."""
        self._close()

    def _close(self) -> None:
        for file in (self._metrics, self._eval):
            if file is not None:
                file.close()
        self._metrics = self._eval = None


def _eval_line(metrics: EvalMetrics) -> dict[str, Any]:
    """The fields of ``metrics``; ``extra`` only for what has metrics of its own."""
    fields = asdict(metrics)
    return fields if metrics.extra else {name: value for name, value in fields.items() if name != "extra"}


class LineFile:
    """A file of JSON lines. Each is handed to the operating system before ``append`` returns."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = SafeFolder(path.parent).append(path.name)
        whole = _whole_lines(self._file)
        if whole is None:
            self._file.close()
            raise OSError(errno.EFBIG, f"its last line has more than {LONGEST_LINE} bytes", str(path))
        self._file.truncate(whole)  # a killed run may have left half a line: cut it off

    def append(self, record: dict[str, Any]) -> None:
        """Append ``record`` as one line of strict JSON. Numbers that are not finite become null."""
        self._file.write(json.dumps(_finite(record), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _whole_lines(file: BinaryIO, block: int = 1 << 16) -> int | None:
    """The bytes of ``file`` up to its last newline, found from the end; None where that is too far."""
    size = end = file.seek(0, os.SEEK_END)
    while end:
        if size - end > LONGEST_LINE:
            return None
        start = max(0, end - block)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _opened(file: LineFile | None) -> LineFile:
    if file is None:
        raise RuntimeError("the file in the run folder is not open")
    return file


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin jsonl of kind observer."""
    return PluginInfo("observer", "jsonl")


@hookimpl
def megatron_run_create_observer() -> Observer:
    """Make the observer; it opens its files when training starts."""
    return JsonLines()
