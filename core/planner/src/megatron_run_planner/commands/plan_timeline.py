"""The predicted step as a trace for Perfetto, in the form of observer ``trace``, and beside a step that it wrote."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from megatron_run.errors import InputError
from megatron_run.files.foreign_file import read_file
from megatron_run.files.latest_run import follow_latest
from megatron_run.files.safe_folder import parse_json
from megatron_run.pipeline.trace_events import trace_document, trace_events
from megatron_run_cli.output import write_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from megatron_run_planner.devices import Device
    from megatron_run_planner.search import Candidate
    from megatron_run_planner.task import Task

#: The most bytes of a trace that is read.
_LARGEST = 1 << 28
#: Microseconds (the file's unit) per second.
_SECOND = 1e6


def write_timeline(
    file: Path, task: Task, shown: Sequence[Candidate], device: Device, beside: Path | None = None
) -> None:
    """Write the steps of ``shown``, a process each, behind those of the trace ``beside``.

    Raises :class:`InputError` when ``file`` cannot be written, or ``beside`` is no trace.
    """
    from megatron_run_planner.step_time import step_timeline

    document = _read(beside) if beside else trace_document(())
    events = document["traceEvents"]
    first = 1 + max((event["pid"] for event in events), default=-1)
    for index, each in enumerate(shown):
        line = step_timeline(task.model, each.split, device, each.plan)
        how = f"{each.schedule} as predicted on {device.name}"
        title = f"{how}: {line.makespan * 1e3:.3g} ms, bubble {line.bubble_fraction:.1%}"
        events += trace_events(line.stages, each.plan.layout, process=first + index, title=title, unit=_SECOND)
    write_file(file, json.dumps(document, allow_nan=False))


def _read(file: Path) -> dict[str, Any]:
    """A trace whose events are numbered by process."""
    try:
        document = parse_json(read_file(follow_latest(file), _LARGEST))
        if all(isinstance(event["pid"], int) for event in document["traceEvents"]):
            return dict(document)
        why = "a process has no number"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = str(error)
    raise InputError(
        f"{file} is no trace", why=why, fix="name a file that --plugin observer=trace wrote, trace/step-10.json"
    )
