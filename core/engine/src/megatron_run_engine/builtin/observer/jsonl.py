"""observer=jsonl: every step to metrics.jsonl and every evaluation to eval.jsonl, one strict JSON object a line."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any, BinaryIO

from megatron_run.contracts import EvalMetrics, Observer, PluginInfo, RunSummary, StepMetrics
from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

#: Version of the lines; raised when a field changes its meaning.
VERSION = 1


class JsonLines(Observer):
    """Appends to both files; nothing written is ever changed. Of a step that was repeated the last line counts."""

    def __init__(self) -> None:
        self._attempt = 0
        self._metrics: LineFile | None = None
        self._eval: LineFile | None = None

    def on_train_start(self, run: RunSummary) -> None:
        """Open both files in the run folder."""
        self._attempt = run.attempt
        self._metrics = LineFile(run.folder / "metrics.jsonl")
        self._eval = LineFile(run.folder / "eval.jsonl")

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Append a line: v, step, attempt, and the fields of :class:`StepMetrics`."""
        numbers = asdict(metrics)
        _opened(self._metrics).append({"v": VERSION, "step": numbers.pop("step"), "attempt": self._attempt, **numbers})

    def on_eval_end(self, metrics: EvalMetrics) -> None:
        """Append a line: the fields of :class:`EvalMetrics`."""
        _opened(self._eval).append(asdict(metrics))

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


class LineFile:
    """A file of JSON lines, each on disk (as far as the operating system goes) when ``append`` returns.

    A run that was killed in the middle of a write may have left the head of a line; it is cut off, since it is none.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab+")
        self._file.seek(0)
        whole = self._file.read().rfind(b"\n") + 1
        self._file.truncate(whole)

    def append(self, record: dict[str, Any]) -> None:
        """Write ``record`` as one line of strict JSON: a number that is not finite becomes null."""
        self._file.write(json.dumps(_finite(record), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
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
