"""The output of ``megatron-run schedule show``: a plan as text, JSON, SVG or a trace. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_run.contracts.schedule import Place, signed_order
from megatron_run.pipeline.picture import leading_forwards, schedule_svg
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.simulate import bubble_fraction, shown_stages, timeline, timeline_text
from megatron_run.pipeline.trace_events import trace_document, trace_events
from megatron_run_cli.output import write_file


def plan_record(plan: Plan) -> dict[str, Any]:
    """A plan as JSON data, in a stable form.

    ``{"stages", "chunks", "microbatches", "valid", "bubble_fraction", "ranks"}``, and for each rank ``rank``,
    ``layers`` (a list per chunk), ``warmup`` (the forwards before the first backward), ``peak_in_flight``,
    ``peak_held``, ``actions`` (``F3.1`` is the forward of microbatch 3 in chunk 1) and ``order`` (a forward is chunk +
    1, a B or I -(chunk + 1)).
    """
    names: dict[object, str] = {}
    return {
        "stages": plan.stages,
        "chunks": plan.chunks,
        "microbatches": plan.microbatches,
        "valid": True,
        "bubble_fraction": bubble_fraction(plan, plan.ends, plan.costs),
        "ranks": [
            {
                "rank": stage,
                "layers": [list(place.layers) for place in places_of(plan.layout, stage)],
                "warmup": leading_forwards(actions),
                "peak_in_flight": plan.peak_in_flight[stage],
                "peak_held": plan.peak_held[stage],
                "actions": [names.get(action) or names.setdefault(action, str(action)) for action in actions],
                "order": signed_order(actions),
            }
            for stage, actions in enumerate(plan.lists)
        ],
    }


def fault_record(stages: int, chunks: int, microbatches: int, fault: str) -> dict[str, Any]:
    """The JSON form of a schedule without a legal plan: ``valid`` is false, and ``fault`` states where and why."""
    return {"stages": stages, "chunks": chunks, "microbatches": microbatches, "valid": False, "fault": fault}


def plan_text(plan: Plan, title: str, width: int = 100) -> str:
    """A plan as text: title and shape, time and memory, the timeline, and what was proven."""
    drawn = timeline(plan, stages=shown_stages(plan.stages))
    shape = f"{_count(plan.stages, 'stage')} x {_count(plan.chunks, 'chunk')}"
    warmup = [leading_forwards(actions) for actions in plan.lists]
    head = [
        f"{title}: a step of {_count(plan.microbatches, 'microbatch', 'es')} on {shape}",
        f"time {drawn.makespan:g} forwards of a chunk, bubble {drawn.bubble_fraction:.1%} of it",
        f"by stage: in flight at most {_few(plan.peak_in_flight)}; warm-up {_few(warmup)} forwards",
    ]
    if any(plan.peak_pending_weights):
        waiting, held = _few(plan.peak_pending_weights), _few(plan.peak_held)
        head.append(f"weight gradients waiting at most {waiting}; in flight or waiting at most {held}")
    bits = "in microbatch order, bit for bit as sequential" if plan.ascending else "in another order than sequential"
    proven = f"valid: complete, in order, free of deadlock; gradients add up {bits}"
    return "\n".join([*head, "", timeline_text(drawn, width), "", proven])


def write_svg(plan: Plan, title: str, file: Path) -> None:
    """Draw ``plan`` into an SVG file. Raises :class:`InputError` if it cannot be written."""
    write_file(file, schedule_svg(plan, title))


def write_trace(plan: Plan, title: str, file: Path) -> None:
    """Write ``plan`` as a trace file for Perfetto. Raises :class:`InputError` if it cannot be written."""
    events = trace_events(timeline(plan).stages, plan.layout, title=f"{title}, as planned")
    write_file(file, json.dumps(trace_document(list(events))))


def places_of(layout: Sequence[Place], stage: int) -> list[Place]:
    """The places of one stage, sorted by chunk."""
    return sorted((place for place in layout if place.stage == stage), key=lambda place: place.chunk)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def _few(numbers: Sequence[int]) -> str:
    """All numbers, or the first two and the last if there are more than 16."""
    shown = [str(number) for number in numbers]
    return ", ".join(shown if len(shown) <= 16 else [*shown[:2], "...", shown[-1]])
