"""How far a composition is from the single process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_run.config.request import Request
from megatron_run.errors import Problems
from megatron_run.planning import resolve
from megatron_run_testing.conformance.composition.attempts import WORLD, Job, Outcome, in_rounds, work
from megatron_run_testing.conformance.composition.space import Composition, with_documents
from megatron_run_testing.ranks import run_on_ranks

Tolerances = tuple[float, float, float, float]
#: What rounding does in fp32, with room: losses, gradient norms (relative), evaluations, weights. Without clipping the
#: update of a weight whose gradient nearly vanishes follows its rounding: one composition in a hundred is beyond them.
TOLERANCES: Tolerances = (2e-6, 5e-6, 2e-6, 1e-6)
#: What it does in 16 bits.
ROUNDED: Tolerances = (3e-2, 6e-2, 3e-2, 3e-2)
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
    def faults(self) -> list[str]:
        """The differences beyond rounding; empty where it was refused."""
        if self.fault:
            return [self.fault]
        beyond = zip(NAMES, self.largest, self.tolerances, strict=True)
        found = [f"{name} differs by {value:.1e}" for name, value, most in beyond if not value <= most]
        return [*found, f"most in {self.where}"] if found and self.where else found


def compare(compositions: Sequence[Composition], extra: Sequence[str] = ()) -> list[Compared]:
    """Train each with its single process. ``extra`` is set in the run alone."""
    with tempfile.TemporaryDirectory() as folder:
        documents = write_documents(Path(folder))
        jobs, refusals, references = list[Job](), list[str](), dict[str, str]()
        for number, composition in enumerate(compositions):
            refusals.append(refusal(composition, documents))
            if not refusals[-1]:
                alone, attempts = _requests(composition, documents, extra)
                if alone.to_json() not in references:  # several may have the same single process
                    references[alone.to_json()] = f"{folder}/{number}-alone"
                    jobs.append(Job(f"{folder}/{number}-alone", [alone]))
                jobs.append(Job(f"{folder}/{number}", attempts))
        found = [Compared(refused=each) for each in refusals]
        if not jobs:
            return found
        rounds = in_rounds(jobs)
        seen = run_on_ranks(work, WORLD, folder, rounds, timeout=60 + 60 * len(jobs))
        if seen.failure and len(compositions) > 1:  # a rank died, and took the others with it: in which run?
            return [compare([each], extra)[0] for each in compositions]
        outcomes = {
            job.home: seen.failure or seen.yielded[job.rank][number]
            for number, side in enumerate(rounds)
            for job in side
        }
        for number, composition in enumerate(compositions):
            if not refusals[number]:
                reference = references[with_documents(composition.reference, documents).to_json()]
                tolerances = ROUNDED if composition.rounded else TOLERANCES
                found[number] = _compared(outcomes[reference], outcomes[f"{folder}/{number}"], tolerances)
        return found


def refusal(composition: Composition, documents: str = "documents") -> str:
    """Why ``composition`` is no valid one, in one line, or an empty string."""
    alone, attempts = _requests(composition, documents, ())
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


def _requests(composition: Composition, documents: str, extra: Sequence[str]) -> tuple[Request, list[Request]]:
    changed = {each.partition("=")[0] for each in extra}

    def with_extra(request: Request) -> Request:
        kept = (each for each in request.sets if each.partition("=")[0] not in changed)
        return replace(request, sets=(*kept, *extra))

    attempts = [with_extra(with_documents(request, documents)) for request in composition.attempts]
    return with_documents(composition.reference, documents), attempts


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
