"""The kernel's own plan for evaluation and generation: forwards only, derived from the layout. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_run.contracts.actions import Action, Place
from megatron_run.pipeline.pairing import check_pairing
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.simulate import completion_order, simulate


def forward_plan(layout: Sequence[Place], stages: int, chunks: int, microbatches: int) -> Plan:
    """Every microbatch through every place, in the order ``(m // P, position, m)``, for any M >= 1.

    Groups of P microbatches keep every stage busy, and M need not be a multiple of P. All stages follow one common
    order, so no deadlock is possible. Nothing is kept for a backward, so the peaks are 0.
    """
    visits = [(microbatch, position) for microbatch in range(microbatches) for position in range(len(layout))]
    lists: list[list[Action]] = [[] for _ in range(stages)]
    for microbatch, position in sorted(visits, key=lambda visit: (visit[0] // stages, visit[1], visit[0])):
        lists[layout[position].stage].append(Action("F", microbatch, layout[position].chunk))
    frozen = tuple(tuple(actions) for actions in lists)
    ends = simulate(layout, microbatches, frozen).ends
    order = completion_order(ends)
    check_pairing(layout, microbatches, frozen, order)
    return Plan(
        layout=tuple(layout),
        stages=stages,
        chunks=chunks,
        microbatches=microbatches,
        lists=frozen,
        order=order,
        peak_in_flight=(0,) * stages,
        peak_pending_weights=(0,) * stages,
        ascending=True,
        ends=ends,
    )
