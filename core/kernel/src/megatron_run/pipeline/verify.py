"""Proves that action lists form a legal plan: complete, in order, free of deadlock, each send paired with its receive.

Pure Python, no torch. A fault raises :class:`~megatron_run.errors.ScheduleError` with its stage, index and action, or
with the cycle of a deadlock. The kernel's own plan for evaluation and generation needs no schedule:
:func:`forward_plan` derives it from the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product

from megatron_run.contracts.schedule import Action, LayoutSpec, Op, Place, ScheduleSpec, check_counts
from megatron_run.errors import ScheduleError
from megatron_run.errors.wording import plural
from megatron_run.pipeline.lower import check_pairing
from megatron_run.pipeline.plan import Plan, activations, positions
from megatron_run.pipeline.simulate import completion_order, simulate, takes_time

#: State machine of one (microbatch, chunk): (state, operation) -> next state. Any other transition is illegal.
_NEW, _FORWARD, _RECOMPUTED, _HALF, _DONE = range(5)
_LIFE: Mapping[tuple[int, str], int] = {
    (_NEW, "F"): _FORWARD,
    (_FORWARD, "R"): _RECOMPUTED,
    (_FORWARD, "B"): _DONE,
    (_RECOMPUTED, "B"): _DONE,
    (_FORWARD, "I"): _HALF,
    (_RECOMPUTED, "I"): _HALF,
    (_HALF, "W"): _DONE,
}

#: The operation that a (microbatch, chunk) in this state still needs, and why.
_MISSING = {
    _NEW: ("F", "every microbatch visits every chunk"),
    _FORWARD: ("B", "its forward has no backward (B, or I and then W)"),
    _RECOMPUTED: ("B", "its forward has no backward (B, or I and then W)"),
    _HALF: ("W", "its input gradient I has no weight gradient"),
}

#: For each operation, the one that must come before it, and those that must not.
_NEEDS: Mapping[str, Op] = {"R": "F", "B": "F", "I": "F", "W": "I"}
_NEVER_AFTER: Mapping[str, str] = {"R": "BI", "B": "I", "I": "B", "W": "B"}


def check_layout(spec: LayoutSpec, layout: Sequence[Place]) -> None:
    """Raise :class:`ScheduleError` unless ``layout`` uses every place once and holds every layer once, in order.

    If the user gave counts, each place must hold that many layers. Counts that do not match the number of places or of
    layers are the user's mistake, :class:`~megatron_run.errors.InputError`, and are checked first.
    """
    check_counts(spec)
    _check_places(layout, spec.stages, spec.chunks)
    following = 0
    for position, place in enumerate(layout):
        if list(place.layers) != list(range(following, following + len(place.layers))):
            raise ScheduleError(
                f"{_place(position, place)} holds the layers {list(place.layers)}",
                why=f"layer {following} comes next: a layout holds each layer once, in model order",
            )
        following += len(place.layers)
    if following != spec.layers:
        raise ScheduleError(
            f"the layout ends after {plural(following, 'layer')}",
            why=f"layers 0 to {spec.layers - 1} must have a place",
        )
    held = [len(place.layers) for place in layout]
    for position, (place, count) in enumerate(zip(layout, spec.counts or held, strict=True)):
        if len(place.layers) != count:
            raise ScheduleError(
                f"{_place(position, place)} holds {plural(len(place.layers), 'layer')}",
                why=f"the user asked for {count}",
            )


def check_same_places(one: Sequence[Place], other: Sequence[Place]) -> None:
    """Raise :class:`ScheduleError` unless two layouts of the same stages and chunks differ only in their layers."""
    for position, (a, b) in enumerate(zip(one, other, strict=True)):
        if a[:2] != b[:2]:
            raise ScheduleError(
                f"{_place(position, a)} is stage {b.stage}, chunk {b.chunk} when the number of layers changes",
                why="a place's stage and chunk follow from the stages and chunks of the layout alone",
            )


def verify(spec: ScheduleSpec, lists: Sequence[Sequence[Action]]) -> Plan:
    """Prove that ``lists``, one per stage, are legal, and derive the plan.

    For every (microbatch, chunk): F, then B, or I and then W; R at most once between F and B or I. For every chunk: S
    at most once, after its last gradient. Raises :class:`ScheduleError` naming stage, index and action or, for a
    deadlock, the cycle of waits. The pairing of all sends and receives is proven for every channel
    (:mod:`~megatron_run.pipeline.lower`). Peaks are counted, not compared with a bound; a schedule that promises one
    has it checked by ``schedule_checks(in_flight=...)`` of :mod:`megatron_run_testing`.
    """
    _check_places(spec.layout, spec.stages, spec.chunks)
    if len(lists) != spec.stages:
        raise ScheduleError(
            f"the schedule gave {plural(len(lists), 'action list')}",
            why=f"the pipeline has {plural(spec.stages, 'stage')}",
        )
    frozen = tuple(tuple(actions) for actions in lists)
    for stage, actions in enumerate(frozen):
        _check_list(spec, stage, actions)
    simulation = simulate(spec.layout, spec.microbatches, frozen, spec.costs)
    heads = [len(ends) for ends in simulation.ends]
    if heads != [len(actions) for actions in frozen]:
        raise _deadlock(spec, frozen, heads)
    # Ends order the messages only where time passes: an action without cost ends when the one that it needs does.
    ordered = simulation if takes_time(spec.costs, simulation) else simulate(spec.layout, spec.microbatches, frozen)
    order = completion_order(ordered.ends)
    check_pairing(spec.layout, spec.microbatches, frozen, order)
    return Plan(
        layout=tuple(spec.layout),
        stages=spec.stages,
        chunks=spec.chunks,
        microbatches=spec.microbatches,
        lists=frozen,
        order=order,
        peak_in_flight=tuple(_peak(activations(actions)) for actions in frozen),
        peak_pending_weights=tuple(_peak(_pending(actions)) for actions in frozen),
        peak_held=tuple(_peak(activations(actions, "BW")) for actions in frozen),
        ascending=not any(map(first_descent, frozen)),
        ends=simulation.ends,
        costs=dict(spec.costs),
    )


def _check_places(layout: Sequence[Place], stages: int, chunks: int) -> None:
    why = f"each chunk of {plural(stages, 'stage')} x {plural(chunks, 'chunk')} must have exactly one place"
    seen: set[tuple[int, int]] = set()
    for position, place in enumerate(layout):
        if not (isinstance(place, Place) and isinstance(place.layers, range)):
            raise ScheduleError(
                f"place {position} of the layout is {place!r}", fix="write Place(stage, chunk, range(first, stop))"
            )
        if not (0 <= place.stage < stages and 0 <= place.chunk < chunks):
            raise ScheduleError(f"{_place(position, place)} is out of range", why=why)
        if place[:2] in seen:
            raise ScheduleError(f"{_place(position, place)} is repeated", why=why)
        seen.add(place[:2])
    for stage, chunk in product(range(stages), range(chunks)):
        if (stage, chunk) not in seen:
            raise ScheduleError(f"the layout has no place for stage {stage}, chunk {chunk}", why=why)


def _place(position: int, place: Place) -> str:
    return f"place {position} of the layout (stage {place.stage}, chunk {place.chunk})"


def _check_list(spec: ScheduleSpec, stage: int, actions: Sequence[Action]) -> None:
    """Run one stage's list through the state machine of each of its (microbatch, chunk) pairs."""
    microbatches, chunks = spec.microbatches, spec.chunks
    states = [_NEW] * (chunks * microbatches)
    unfinished = [microbatches] * chunks
    synced = [False] * chunks
    for index, action in enumerate(actions):
        if not isinstance(action, Action):
            raise _fault(stage, index, repr(action), "is not an Action", "write Action('F', microbatch, chunk)")
        op, microbatch, chunk = action
        if not (0 <= chunk < chunks and 0 <= microbatch < microbatches):
            stage_has, step_has = plural(chunks, "chunk"), plural(microbatches, "microbatch")
            shape = f"the stage has {stage_has} and the step {step_has}, counted from 0"
            raise _fault(stage, index, action, "is out of range", shape)
        if op == "S":
            if microbatch or synced[chunk] or unfinished[chunk]:
                raise _early_or_repeated(stage, actions, index)
            synced[chunk] = True
            continue
        slot = chunk * microbatches + microbatch
        state = _LIFE.get((states[slot], op))
        if state is None:
            raise _early_or_repeated(stage, actions, index)
        states[slot] = state
        unfinished[chunk] -= state == _DONE
    if any(unfinished):
        raise _missing(stage, states, microbatches)


def _early_or_repeated(stage: int, actions: Sequence[Action], index: int) -> ScheduleError:
    """The error for the action at ``index``, which is illegal in the state of its (microbatch, chunk)."""
    action = actions[index]
    op, microbatch, chunk = action
    first = actions.index(action)
    if first < index:
        return _fault(stage, index, action, "is repeated", f"it already stands at action {first}")
    if op == "S" and microbatch:
        return _fault(stage, index, action, "has a microbatch", f"S is for a whole chunk: write S0.{chunk}")
    if op == "S":
        return _fault(stage, index, action, "is too early", f"chunk {chunk} has gradients to come after it")
    if op not in "FBIWR":
        return _fault(stage, index, action, "is unknown", "the operations are F, B, I, W, S and R")
    for earlier, other in enumerate(actions[:index]):
        if other[1:] == action[1:] and other.op in _NEVER_AFTER[op]:
            return _fault(stage, index, action, "is too late", f"{other} stands at action {earlier} already")
    needed = Action(_NEEDS[op], microbatch, chunk)
    where = f"stands later, at action {actions.index(needed)}" if needed in actions else "is nowhere in the list"
    return _fault(stage, index, action, "is too early", f"it needs {needed} before it, which {where}")


def _missing(stage: int, states: Sequence[int], microbatches: int) -> ScheduleError:
    """The error for an incomplete list; it names the first missing action."""
    slot = next(slot for slot, state in enumerate(states) if state != _DONE)
    op, why = _MISSING[states[slot]]
    chunk, microbatch = divmod(slot, microbatches)
    more = sum(state != _DONE for state in states) - 1
    rest = f"; {more} more (microbatch, chunk) pairs are unfinished" if more else ""
    return ScheduleError(f"stage {stage}: {op}{microbatch}.{chunk} is missing", why=why + rest)


def _fault(stage: int, index: int, action: object, what: str, why: str) -> ScheduleError:
    return ScheduleError(f"stage {stage}, action {index}: {action} {what}", why=why)


def _deadlock(spec: ScheduleSpec, lists: Sequence[Sequence[Action]], heads: Sequence[int]) -> ScheduleError:
    """The error for a deadlock: follow the waits from the first stuck stage until a stage repeats, the cycle."""
    awaited = _awaited(spec, lists)
    stage = next(stage for stage, head in enumerate(heads) if head < len(lists[stage]))
    path: list[int] = []
    # Ends, since a stage that waits for one that is not stuck would have gone on in the simulation.
    while stage not in path:
        path.append(stage)
        stage = awaited(stage, heads[stage])[0]
    cycle = path[path.index(stage) :]
    waits = []
    for stage in cycle:
        peer, index = awaited(stage, heads[stage])
        asks = f"stage {stage}, action {heads[stage]}: {lists[stage][heads[stage]]} waits for {lists[peer][index]}"
        waits.append(f"{asks} of stage {peer} (action {index}, behind {lists[peer][heads[peer]]})")
    return ScheduleError("the schedule deadlocks", why="; ".join(waits))


def _awaited(spec: ScheduleSpec, lists: Sequence[Sequence[Action]]) -> Callable[[int, int], tuple[int, int]]:
    """A function from a stuck action's (stage, index) to that of the action it waits for."""
    position_of = positions(spec.layout)

    def awaited(stage: int, index: int) -> tuple[int, int]:
        # One of F, B and I: what the others need stands before them in the same list, which _check_list has proven.
        op, microbatch, chunk = lists[stage][index]
        position = position_of[stage, chunk]
        place = spec.layout[position - 1 if op == "F" else position + 1]
        ops: tuple[Op, ...] = ("F",) if op == "F" else ("B", "I")
        wanted = [Action(wanted_op, microbatch, place.chunk) for wanted_op in ops]
        return place.stage, next(i for i, action in enumerate(lists[place.stage]) if action in wanted)

    return awaited


def _pending(actions: Iterable[Action]) -> Iterator[int]:
    """Change of the number of pending weight gradients by each action."""
    return ({"I": 1, "W": -1}.get(action.op, 0) for action in actions)


def _peak(changes: Iterable[int]) -> int:
    """The highest running sum."""
    return max(accumulate(changes), default=0)


def first_descent(actions: Sequence[Action]) -> tuple[int, Action] | None:
    """The first action whose gradients a chunk computes after those of a later microbatch, and that earlier action.

    Input gradients and weight gradients are ordered separately. The first result is the action's index; None if every
    chunk computes both in microbatch order.
    """
    inputs: dict[int, Action] = {}
    weights: dict[int, Action] = {}
    for index, action in enumerate(actions):
        op, microbatch, chunk = action
        if op in "BI":
            if inputs.get(chunk, action).microbatch > microbatch:
                return index, inputs[chunk]
            inputs[chunk] = action
        if op in "BW":
            if weights.get(chunk, action).microbatch > microbatch:
                return index, weights[chunk]
            weights[chunk] = action
    return None


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
        peak_held=(0,) * stages,
        ascending=True,
        ends=ends,
    )
