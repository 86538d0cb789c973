"""What a run with graphs must have in common with the run without, with its plan, and with formulas of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_run.contracts.schedule import Action
from tests.integration.graph_grid import Case
from tests.support.training import Seen

NUMBERS = ("losses", "norms", "validation")
#: How far numbers may be apart, in parts of themselves, where a gradient is added up in another order.
NEARLY = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


@dataclass(frozen=True)
class Compared:
    """One case: what its ranks saw with graphs, and without."""

    case: Case
    graphed: Sequence[Seen]
    eager: Sequence[Seen]

    def faults(self) -> Iterator[str]:
        """Everything that is wrong."""
        yield from number_faults(self)
        yield from capture_faults(self)


def number_faults(compared: Compared) -> Iterator[str]:
    """All numbers are those of the run without graphs, bit for bit, or nearly where additions change places."""
    case, mine, other = compared.case, compared.graphed[0], compared.eager[0]
    if len(other.losses) != case.arrangement.steps or len(other.validation) < 2:
        yield f"{case}: {len(other.losses)} steps and {len(other.validation)} evaluations without graphs"
    if not case.reordered:
        yield from bit_faults(compared)
        return
    for name in NUMBERS:
        found, expected = getattr(mine, name), getattr(other, name)
        if len(found) != len(expected) or not np.allclose(found, expected, rtol=NEARLY[case.precision], atol=0):
            yield f"{case}: {name} are {found}, without graphs {expected}"


def bit_faults(compared: Compared) -> Iterator[str]:
    """Losses, norms, evaluations and each rank's weights are those of the run without graphs, bit for bit."""
    case, mine, other = compared.case, compared.graphed[0], compared.eager[0]
    for name in NUMBERS:
        found, expected = getattr(mine, name), getattr(other, name)
        if found != expected or not np.isfinite(expected).all():
            yield f"{case}: {name} are {found}, without graphs {expected}"
    differing = [rank for rank, pair in enumerate(zip(compared.graphed, compared.eager, strict=True)) if _apart(*pair)]
    if differing:
        yield f"{case}: the weights of ranks {differing} differ"


def capture_faults(compared: Compared) -> Iterator[str]:
    """Each rank captures when it should, and as much as was planned: as many graphs and slots as formulas say."""
    case = compared.case
    for rank, seen in enumerate(compared.graphed):
        steps = [said.step for said in seen.captured]
        if steps != case.arrangement.captured_at:
            yield f"{case}: rank {rank} captured before steps {steps}"
        for said in seen.captured:
            made, planned = counts(said.captured), counts(said.planned)
            if made != planned or not said.captured.static_bytes or not said.captured.pool_bytes:
                yield f"{case}: rank {rank} captured {said.captured}, planned {said.planned}"
        if seen.captured and (found := counts(seen.captured[-1].captured)) != (expected := formula(case, seen)):
            yield f"{case}: rank {rank} captured {found} regions, graphs and slots where formulas give {expected}"


def formula(case: Case, seen: Seen) -> tuple[int, int, int]:
    """Regions, graphs and slots of a step of the full batch on the stage of ``seen``, from its action list alone."""
    assert case.way is not None
    regions, actions = chunk_regions(case, seen), seen.plan.lists[seen.stage]
    peaks = [peak(action for action in actions if action.chunk == chunk) for chunk in range(len(regions))]
    if case.way.reuse == "per_slot":
        return sum(regions), 2 * sum(map(int.__mul__, regions, peaks)), sum(peaks)
    return sum(regions), 2 * sum(regions) * recorded(actions, len(regions)), peak(actions)


def recorded(actions: Sequence[Action], chunks: int) -> int:
    """Microbatches, without those of parts that repeat another one and begin and end with nothing in flight."""
    whole = Counter((action.microbatch, action.chunk) for action in actions)
    found, part = dict[object, int](), list[Action]()
    for action in actions:
        part.append(action)
        here = Counter((each.microbatch, each.chunk) for each in part)
        ran = Counter(chunk for _, chunk in here)
        if (
            all(whole[key] == count for key, count in here.items())
            and len({ran[chunk] for chunk in range(chunks)}) == 1
        ):
            first = part[0].microbatch
            found[tuple((op, m - first, chunk) for op, m, chunk in part)] = len({m for _, m, _ in part})
            part = []
    return sum(found.values())


def chunk_regions(case: Case, seen: Seen) -> list[int]:
    """How many regions each chunk of the stage has: those of its layers, of the embedding and of the head."""
    layout = seen.plan.layout
    found = [0] * case.arrangement.shape.chunks
    for position, (place, count) in enumerate(zip(layout, case.arrangement.counts, strict=True)):
        if place.stage == seen.stage:
            ends = (position == 0) + (position == len(layout) - 1)
            found[place.chunk] = ends + count * case.network.regions
    return found


def peak(actions: Iterator[Action] | Sequence[Action]) -> int:
    """The most microbatches between their forward and the end of their backward at once."""
    listed = list(actions)
    ends = Counter((action.microbatch, action.chunk) for action in listed if action.op in "BIW")
    held = most = 0
    for action in listed:
        key = action.microbatch, action.chunk
        if action.op == "F":
            held += 1
        elif action.op in "BIW":
            ends[key] -= 1
            held -= not ends[key]
        most = max(most, held)
    return most


def byte_faults(trained: Mapping[Case, Sequence[Seen]]) -> Iterator[str]:
    """Chaining needs no more static inputs."""
    for case, ranks in trained.items():
        if case.way is None:
            continue
        copied = trained.get(replace(case, way=replace(case.way, chain=False)), ranks)
        for rank, (chained, more) in enumerate(zip(map(held, ranks), map(held, copied), strict=True)):
            if any(one > other for (one, _), (other, _) in zip(chained, more, strict=False)):
                yield f"{case}: rank {rank} holds {chained} bytes of inputs and graphs, copied {more}"


def held(seen: Seen) -> list[tuple[int, int]]:
    """Bytes of static inputs and of graphs, by capture."""
    return [(said.captured.static_bytes, said.captured.pool_bytes) for said in seen.captured]


def counts(size: Any) -> tuple[int, int, int]:
    """Regions, graphs and slots."""
    return size.regions, size.graphs, size.slots


def _apart(mine: Seen, other: Seen) -> bool:
    return not mine.weights or mine.weights != other.weights
