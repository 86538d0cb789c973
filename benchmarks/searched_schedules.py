"""Do searched schedules beat zb-v on uneven stages, at the same memory? Simulated steps, beside a lower bound.

    python -m benchmarks.searched_schedules [--quick]

Each case has layers of given seconds and bytes. zb-v deals them out evenly. The memory of a rank is what the fullest
rank of zb-v takes, for state and activations. Searched are an order for zb-v's own places, and places and order
together; zb-v on the searched places is beside them, where it may take more memory. Seconds of search are processor
time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.support.command import run
from benchmarks.support.report import table
from megatron_run.contracts.schedule import Action, LayoutSpec, ScheduleSpec
from megatron_run_planner.schedules import spread
from megatron_run_planner.schedules.places import EFFORT, search_schedule
from megatron_run_planner.schedules.polish import makespan
from megatron_run_planner.schedules.workload_costs import Pipeline, Placed, Work
from megatron_run_schedule_zero_bubble import ZeroBubbleV

_NONE = Work(0.0, 0.0, 0.0)
#: A dense layer, one with recomputation, one with experts; an embedding; heads of one, two and four layers' work.
_LAYER, _RECOMPUTED, _EXPERTS = Work(1, 1.1, 0.9, 1, 1), Work(1, 2.1, 0.9, 0.1, 1), Work(2.2, 2.4, 2.0, 1.6, 4)
_EMBEDDING, _HEADS = Work(0.2, 0, 0.2, 0, 2), {n: Work(n, n, n, 0.5, 2) for n in (1, 2, 4)}

#: Layers, what precedes and follows them, stages, chunks, microbatches, seconds of a message.
CASES = {
    "even, no ends": Pipeline((_LAYER,) * 16, _NONE, _NONE, 4, 2, 16),
    "head of 1 layer": Pipeline((_LAYER,) * 32, _EMBEDDING, _HEADS[1], 4, 2, 16, 0.05),
    "head of 2 layers": Pipeline((_LAYER,) * 16, _EMBEDDING, _HEADS[2], 4, 2, 16, 0.05),
    "head of 4, 8 stages": Pipeline((_LAYER,) * 40, _EMBEDDING, _HEADS[4], 8, 2, 32, 0.05),
    "few microbatches": Pipeline((_LAYER,) * 16, _EMBEDDING, _HEADS[2], 4, 2, 4, 0.05),
    "slow messages": Pipeline((_LAYER,) * 16, _EMBEDDING, _HEADS[1], 4, 2, 16, 0.5),
    "recomputation": Pipeline((_RECOMPUTED,) * 24, _EMBEDDING, _HEADS[2], 4, 2, 16, 0.05),
    "dense, then experts": Pipeline((_LAYER,) * 8 + (_EXPERTS,) * 16, _EMBEDDING, _HEADS[2], 4, 2, 16, 0.05),
    "experts in every 2nd": Pipeline((_LAYER, _EXPERTS) * 16, _EMBEDDING, _HEADS[2], 8, 2, 16, 0.05),
    "18 layers, 4 stages": Pipeline((_LAYER,) * 18, _NONE, _NONE, 4, 2, 16, 0.05),
}


def folded(whole: Pipeline, counts: tuple[int, ...]) -> tuple[Placed, list[list[Action]]]:
    """The places and lists of zb-v for ``counts`` layers at its places."""
    made = ZeroBubbleV()
    layout = made.layout(LayoutSpec(whole.stages, 2, len(whole.layers), counts))
    return whole.placed(layout), made.actions(ScheduleSpec(layout, whole.stages, 2, whole.microbatches))


def measure(name: str, whole: Pipeline, effort: int) -> Iterator[str]:
    """A row of the table."""
    even, lists = folded(whole, tuple(spread(len(whole.layers), 2 * whole.stages)))
    state = [sum(even.works[k].state for k in positions) for positions in even.on_stage]
    memory = max(held + own for held, own in zip(even.peaks(lists), state, strict=True))
    limited, first = replace(whole, memory=memory), makespan(even, lists)
    start = time.process_time()
    same = search_schedule(limited, [len(place.layers) for place in even.layout], effort=effort)
    found = search_schedule(limited, effort=effort)
    took = time.process_time() - start
    counts = tuple(len(place.layers) for place in found.placed.layout)
    moved, orders = folded(whole, counts)
    fits = limited.placed(moved.layout).fits(orders)
    yield name
    yield f"{first:.1f}"
    yield from (f"{each.seconds:.1f} ({first / each.seconds - 1:+.1%}), {each.bound:.1f}" for each in (same, found))
    yield f"{makespan(moved, orders):.1f}{'' if fits else ', too large'}"
    yield f"{took:.1f}"


def report(*, quick: bool) -> Iterator[str]:
    """Every case, as soon as it is searched."""
    yield "\nUnits are a dense layer's forward. In brackets, how much longer zb-v takes than what was searched; behind"
    yield "them, a bound that no order of the same places beats.\n"
    columns = ("case", "zb-v", "its places", "own places", "zb-v there", "search, s")
    effort = EFFORT // 8 if quick else EFFORT
    yield from table(columns, (tuple(measure(name, whole, effort)) for name, whole in CASES.items()))


if __name__ == "__main__":
    run("searched_schedules", "searched schedules beside zb-v", __doc__ or "", report)
