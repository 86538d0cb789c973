"""How far a composition is from the single process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from megatron_run.config.request import Request
from megatron_run.errors import Problems
from megatron_run.planning import resolve
from megatron_run_testing.conformance.composition.attempts import WORLD, Job, Outcome, in_rounds, work
from megatron_run_testing.conformance.composition.space import Composition, with_documents
from megatron_run_testing.ranks import run_on_ranks

Tolerances = tuple[float, float, float, float]
#: What rounding does in fp32, with room: losses, gradient norms (relative), evaluations, weights.
TOLERANCES: Tolerances = (2e-6, 5e-6, 2e-6, 1e-6)
#: What it does in 16 bits.
ROUNDED: Tolerances = (3e-2, 6e-2, 3e-2, 3e-2)
#: Loss scales that round every gradient anew and change nothing else: what such a single process differs by from itself
#: is taken for rounding where a composition is beyond the tolerances. An update whose gradient nearly vanishes follows
#: its rounding, and nothing but the network and its data says how far. A run may differ ``_TIMES`` as much as they do.
_SCALES, _TIMES = (3, 5, 7), 3.0
NAMES = ("a loss", "a gradient norm", "an evaluation", "a weight")


@dataclass(frozen=True)
class Compared:
    """The largest differences of a run from its single process, each of ``NAMES``.

    ``where`` names the weight that differs most. ``fault`` is why there are no differences, or empty; ``refused``: why
    the composition is no valid one.
    """

    largest: Tolerances = (0.0, 0.0, 0.0, 0.0)
    where: str = ""
    fault: str = ""
    refused: str = ""
    tolerances: Tolerances = TOLERANCES

    @property
    def beyond(self) -> bool:
        """Whether there are differences that only a measured ``tolerances`` takes for rounding, if any does."""
        return any(not value <= most for value, most in zip(self.largest, TOLERANCES, strict=True))

    @property
    def faults(self) -> list[str]:
        """The differences beyond rounding; empty where it was refused."""
        if self.fault:
            return [self.fault]
        beyond = zip(NAMES, self.largest, self.tolerances, strict=True)
        found = [f"{name} differs by {value:.1e}" for name, value, most in beyond if not value <= most]
        return [*found, f"most in {self.where}"] if found and self.where else found


def compare(compositions: Sequence[Composition], extra: Sequence[str] = ()) -> list[Compared]:
    """Train each with its single process. ``extra`` is set in the run alone.

    Where a run differs by more than ``TOLERANCES``, single processes that round otherwise say how much rounding does.
    """
    with tempfile.TemporaryDirectory() as folder:
        documents = write_documents(Path(folder))
        found = [Compared(refused=refusal(each, documents)) for each in compositions]
        kept = [number for number, each in enumerate(found) if not each.refused]
        attempts = {number: _attempts(compositions[number], documents, extra) for number in kept}
        alone = {number: [with_documents(compositions[number].reference, documents)] for number in kept}
        outcomes = _outcomes([*alone.values(), *attempts.values()], f"{folder}/first")
        if outcomes.failure and len(compositions) > 1:  # a rank died, and took the others with it: in which run?
            return [compare([each], extra)[0] for each in compositions]
        for number in kept:
            tolerances = ROUNDED if compositions[number].rounded else TOLERANCES
            found[number] = _compared(outcomes.of(alone[number]), outcomes.of(attempts[number]), tolerances)
        differ = [number for number in kept if found[number].faults and not found[number].fault]
        others = {number: [[_rounded(alone[number][0], scale)] for scale in _SCALES] for number in differ}
        rounded = _outcomes([run for runs in others.values() for run in runs], f"{folder}/rounded")
        for number in differ:
            seen = [_compared(outcomes.of(alone[number]), rounded.of(run), TOLERANCES) for run in others[number]]
            found[number] = replace(found[number], tolerances=measured(found[number].tolerances, seen))
        return found


class _Outcomes(NamedTuple):
    """Outcomes of runs, each by its attempts as text; the first ``failure`` of a rank that died, or empty."""

    seen: Mapping[str, Outcome | str]
    failure: str = ""

    def of(self, attempts: Sequence[Request]) -> Outcome | str:
        return self.seen[_key(attempts)]


def _outcomes(runs: Sequence[Sequence[Request]], home: str) -> _Outcomes:
    """Train ``runs``, each given by its attempts, in folders below ``home``; equal ones once."""
    different = {_key(attempts): attempts for attempts in runs}
    if not different:
        return _Outcomes({})
    jobs = {key: Job(f"{home}/{number}", run) for number, (key, run) in enumerate(different.items())}
    Path(home).mkdir()
    rounds = in_rounds([*jobs.values()])
    ran = run_on_ranks(work, WORLD, home, rounds, timeout=60 + 60 * len(jobs))
    by_home = {
        job.home: ran.failure or ran.yielded[job.rank][number] for number, side in enumerate(rounds) for job in side
    }
    return _Outcomes({key: by_home[job.home] for key, job in jobs.items()}, ran.failure)


def _key(attempts: Sequence[Request]) -> str:
    return "\n".join(request.to_json() for request in attempts)


def _rounded(alone: Request, scale: int) -> Request:
    """The single process ``alone`` with other roundings of its gradients."""
    kept = (each for each in alone.plugins if not each.startswith("scaler="))
    return replace(alone, plugins=(*kept, f"scaler=constant,loss_scale={scale}"))


def refusal(composition: Composition, documents: str = "documents") -> str:
    """Why ``composition`` is no valid one, in one line, or an empty string."""
    alone, attempts = with_documents(composition.reference, documents), _attempts(composition, documents, ())
    for request in (alone, *attempts):
        try:
            resolve(request)
        except Problems as problems:
            return str(problems.problems[0]).partition("\n")[0]
    return ""


def write_documents(folder: Path) -> str:
    """Write an indexed dataset of short documents into ``folder``; its prefix. The same bytes whenever and wherever."""
    from megatron_run_engine.data.indexed_files import IndexedWriter

    generator = np.random.default_rng(0)
    prefix = folder / "documents"
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(240):
            for _ in range(generator.integers(1, 4)):  # sentences, in which some tokens are likelier than others
                writer.add(1 + generator.integers(0, 26, generator.integers(3, 9)) ** 2 // 26)
            writer.end_document()
    return str(prefix)


def _attempts(composition: Composition, documents: str, extra: Sequence[str]) -> list[Request]:
    """The run's attempts, with ``extra`` in place of what else they set of the same keys."""
    changed = {each.partition("=")[0] for each in extra}

    def with_extra(request: Request) -> Request:
        kept = (each for each in request.sets if each.partition("=")[0] not in changed)
        return replace(request, sets=(*kept, *extra))

    return [with_extra(with_documents(request, documents)) for request in composition.attempts]


def measured(tolerances: Tolerances, rounded: Sequence[Compared]) -> Tolerances:
    """``tolerances``, or more where ``rounded`` processes differ by more. What diverged says nothing."""
    largest = [tuple(_TIMES * value for value in each.largest) for each in rounded if all(map(isfinite, each.largest))]
    return cast("Tolerances", tuple(map(max, zip(tolerances, *largest, strict=True))))


def _compared(alone: Outcome | str, run: Outcome | str, tolerances: Tolerances) -> Compared:
    if isinstance(alone, str) or isinstance(run, str):
        return Compared(fault=f"{alone}")
    if alone.refused or run.refused:
        return Compared(refused=alone.fault or run.fault)
    if fault := alone.fault or run.fault:
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
    return Compared(largest, worst, tolerances=tolerances)


def _apart(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    """The largest difference; infinite where one has a step that the other lacks, or no number."""
    if first.keys() != second.keys():
        return float("inf")
    differences = [abs(first[step] - second[step]) for step in first]
    return max((float("inf") if np.isnan(each) else each for each in differences), default=0.0)
