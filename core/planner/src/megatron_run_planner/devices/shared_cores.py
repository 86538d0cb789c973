"""Simulates action lists on cores that all ranks of a machine share: each rank computes slower while others do.

Time advances from one change to the next: an action begins or ends, or a message arrives. Between two changes as many
ranks compute as before, so each action progresses at one speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from megatron_run.contracts.schedule import Action
from megatron_run.pipeline.plan import Plan
from megatron_run_planner.devices import Cores

#: What an action waits for or makes known: (is it a gradient, position of the layout that made it, microbatch).
Result = tuple[bool, int, int]


def simulate_shared(
    plan: Plan, costs: Sequence[Mapping[str, float]], message: float, ranks: int, cores: Cores
) -> list[list[float]]:
    """When each action of each stage ends. A stage is ``ranks`` ranks that do the same at the same time.

    ``costs`` are seconds of a rank alone, per position of the layout; ``message`` is the time to another stage, during
    which nobody computes. An operation absent from ``costs`` is free.
    """
    places = {(place.stage, place.chunk): index for index, place in enumerate(plan.layout)}
    ends: list[list[float]] = [[] for _ in plan.lists]
    left: dict[int, float] = {}  # stage -> seconds of its action that are to do, at full speed
    known: set[Result] = set()
    arriving: list[tuple[float, Result]] = []
    now = 0.0
    while True:
        while arriving and arriving[0][0] <= now:
            known.add(heappop(arriving)[1])
        for stage, actions in enumerate(plan.lists):
            if stage not in left and len(ends[stage]) < len(actions):
                action = actions[len(ends[stage])]
                position = places[stage, action.chunk]
                awaited = _awaited(action, position, len(plan.layout))
                if awaited is None or awaited in known:
                    left[stage] = costs[position].get(action.op, 0.0)
        if not left and not arriving:
            return ends
        slower = cores.slower(len(left) * ranks, len(plan.lists) * ranks) if left else 1.0
        until = min([now + seconds * slower for seconds in left.values()] + [at for at, _ in arriving[:1]])
        for stage in list(left):
            left[stage] -= (until - now) / slower
        now = until
        for stage in [stage for stage, seconds in left.items() if seconds <= 1e-12]:
            del left[stage]
            action = plan.lists[stage][len(ends[stage])]
            ends[stage].append(now)
            position = places[stage, action.chunk]
            if action.op in "FBI":
                target = position + (1 if action.op == "F" else -1)
                local = not 0 <= target < len(plan.layout) or plan.layout[target].stage == stage
                heappush(arriving, (now + (0.0 if local else message), (action.op != "F", position, action.microbatch)))


def _awaited(action: Action, position: int, positions: int) -> Result | None:
    """What ``action`` at ``position`` waits for from another position; None if nothing."""
    if action.op == "F" and position:
        return False, position - 1, action.microbatch
    if action.op in "BI" and position + 1 < positions:
        return True, position + 1, action.microbatch
    return None
