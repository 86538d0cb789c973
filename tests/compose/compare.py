"""How far a composition is from the single process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_run.config.request import Request
from megatron_run.errors import Problems
from megatron_run.planning import resolve
from tests.compose.draw import Composition
from tests.compose.runs import WORLD, Job, Outcome, work
from tests.support.ranks import run_ranks

#: What rounding does in fp32, with room: losses, gradient norms (relative), evaluations, weights.
TOLERANCES = (2e-6, 5e-6, 2e-6, 1e-6)
_NAMES = ("a loss", "a gradient norm", "an evaluation", "a weight")


@dataclass(frozen=True)
class Compared:
    """The largest differences of a run from its single process; ``fault`` is why there are none, or empty."""

    largest: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    where: str = ""
    fault: str = ""


def faults(compared: Compared) -> list[str]:
    """What is beyond rounding."""
    if compared.fault:
        return [compared.fault]
    beyond = zip(_NAMES, compared.largest, TOLERANCES, strict=True)
    return [f"{name} differs by {value:.1e}" for name, value, most in beyond if not value <= most]


def compare(compositions: Sequence[Composition], extra: Sequence[str] = ()) -> list[Compared | None]:
    """Train each with its single process; None for one that is refused. ``extra`` is set in the run alone."""
    with tempfile.TemporaryDirectory() as folder:
        jobs, places = list[Job](), dict[int, int]()
        for number, composition in enumerate(compositions):
            attempts = [_with(request, extra) for request in composition.attempts]
            if not all(map(_valid, (composition.reference, *attempts))):
                continue
            places[number] = len(jobs)
            jobs.append(Job(f"{folder}/{number}-alone", [composition.reference], number % WORLD))
            jobs.append(Job(f"{folder}/{number}", attempts))
        if not jobs:
            return [None] * len(compositions)
        seen = run_ranks(work, WORLD, folder, jobs, timeout=60 + 60 * len(jobs))
    found = list[Compared | None]()
    for number in range(len(compositions)):
        place = places.get(number)
        found.append(None if place is None else _compared(seen[number % WORLD][place], seen[0][place + 1]))
    return found


def _with(request: Request, extra: Sequence[str]) -> Request:
    changed = {each.partition("=")[0] for each in extra}
    kept = (each for each in request.sets if each.partition("=")[0] not in changed)
    return Request(configs=request.configs, sets=(*kept, *extra), plugins=request.plugins, nproc=request.nproc)


def _valid(request: Request) -> bool:
    try:
        resolve(request)
    except Problems:
        return False
    return True


def _compared(alone: Outcome, run: Outcome) -> Compared | None:
    if run.refused:
        return None
    fault = alone.fault or run.fault
    if fault:
        return Compared(fault=fault)
    if alone.weights.keys() != run.weights.keys():
        return Compared(fault=f"weights of one side alone: {sorted(alone.weights.keys() ^ run.weights.keys())}")
    norms = {step: norm / max(alone.norms[step], 1e-12) for step, norm in run.norms.items()}
    weights = {name: float(np.abs(value - alone.weights[name]).max()) for name, value in run.weights.items()}
    worst = max(weights, key=weights.__getitem__)
    largest = (
        _apart(alone.losses, run.losses),
        _apart(dict.fromkeys(alone.norms, 1.0), norms),
        _apart(alone.validation, run.validation),
        weights[worst],
    )
    return Compared(largest, worst)


def _apart(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    """The largest difference; infinite where one has a step that the other lacks, or no number."""
    if first.keys() != second.keys():
        return float("inf")
    differences = [abs(first[step] - second[step]) for step in first]
    return max((float("inf") if np.isnan(each) else each for each in differences), default=0.0)
