"""A step in the Trace Event Format of Chrome's tracing tool, which Perfetto and chrome://tracing open. No torch.

Each stage has a track and a counter of its activations in flight; each action is a complete event, and each message
between stages a flow arrow. A planned step and a measured step have the same form, so one file may hold both, as two
processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_run.contracts.observer import Bar
from megatron_run.contracts.schedule import Place
from megatron_run.pipeline.plan import activations, positions

Event = dict[str, Any]

#: Names of the operations on a track.
NAMES: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "S": "start gradient sync",
    "R": "recompute",
}
#: Length in microseconds of a planned unit, the forward of one chunk.
UNIT = 1000.0
#: Parts of a microsecond to which moments are rounded.
_EIGHTHS = 8


def trace_document(events: Sequence[Event]) -> dict[str, Any]:
    """The whole file, as JSON data."""
    return {"displayTimeUnit": "ms", "traceEvents": list(events)}


def trace_events(
    stages: Sequence[Sequence[Bar]], layout: Sequence[Place], *, process: int = 0, title: str, unit: float = UNIT
) -> Iterator[Event]:
    """The events of one step, whose bars are in units of ``unit`` microseconds; ``process`` numbers the steps."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for stage, bars in enumerate(stages):
        track = {"pid": process, "tid": _track(stage)}
        yield {"ph": "M", "name": "thread_name", **track, "args": {"name": f"stage {stage}"}}
        yield {"ph": "M", "name": "thread_sort_index", **track, "args": {"sort_index": stage}}
        yield from ({**_slice(bar, unit), **track} for bar in bars)
        yield from ({**each, "pid": process} for each in _counter(stage, bars, unit))
    yield from _arrows(stages, layout, process, unit)


def _slice(bar: Bar, unit: float) -> Event:
    action = bar.action
    return {
        "ph": "X",
        "name": str(action),
        "cat": NAMES[action.op],
        "ts": _moment(bar.start, unit),
        "dur": _moment(bar.end, unit) - _moment(bar.start, unit),
        "args": {"operation": NAMES[action.op], "microbatch": action.microbatch, "chunk": action.chunk},
    }


def _counter(stage: int, bars: Sequence[Bar], unit: float) -> Iterator[Event]:
    """A counter of the stage's activations: one more when a forward starts, one less when its backward ends."""
    held = 0
    for bar, change in zip(bars, activations([bar.action for bar in bars]), strict=True):
        if change:
            held += change
            when = bar.start if change > 0 else bar.end
            name = f"in flight, stage {stage}"
            yield {"ph": "C", "name": name, "ts": _moment(when, unit), "args": {"activations": held}}


def _arrows(stages: Sequence[Sequence[Bar]], layout: Sequence[Place], process: int, unit: float) -> Iterator[Event]:
    """For each message, a flow from the end of the action that sends it to the start of the one that consumes it."""
    position_of = positions(layout)
    bars = {
        ("F" if bar.action.op == "F" else "B", bar.action.microbatch, position_of[stage, bar.action.chunk]): bar
        for stage, line in enumerate(stages)
        for bar in line
        if bar.action.op in "FBI"
    }
    for number, ((op, microbatch, position), bar) in enumerate(bars.items()):
        target = position + (1 if op == "F" else -1)
        used = bars.get((op, microbatch, target))
        if used is None or layout[target].stage == layout[position].stage:
            continue
        kind = "activation" if op == "F" else "gradient"
        # Perfetto reads numbers alone, and joins arrows of one number over all processes.
        flow = {"name": kind, "cat": "message", "pid": process, "id": process << 32 | number}
        leaves = max(bar.start, bar.end - 1 / unit)  # inside the bar: viewers attach an arrow to the bar at its time
        yield {"ph": "s", **flow, "tid": _track(layout[position].stage), "ts": _moment(leaves, unit)}
        yield {"ph": "f", "bp": "e", **flow, "tid": _track(layout[target].stage), "ts": _moment(used.start, unit)}


def _track(stage: int) -> int:
    """The number of a stage's track: from 1, since Perfetto takes a thread 0 for the process's own."""
    return stage + 1


def _moment(when: float, unit: float) -> float:
    """``when`` in microseconds, to the eighth: whole nanoseconds, of which binary fractions lose none.

    Perfetto counts in nanoseconds, and drops a bar that begins one before another's end.
    """
    return round(when * unit * _EIGHTHS) / _EIGHTHS
