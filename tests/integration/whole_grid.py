"""Does every schedule train what a single process trains? In every shape and every variant, with every refusal.

    make grid

Each accepted shape of ``grid.py``, with and without tied embeddings, dropout and activation checkpointing: the order
that ran, first gradients, losses of 20 steps, activations in flight and messages; and each refusal. The test suite runs
each two choices together once; this is the whole product, ``python -m tests.integration.whole_grid``. Prints a table,
and exits with 1 when something is wrong. Two cores need some minutes.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np

from tests.integration.grid import RULES, Case, Shape, shapes, whole_product
from tests.integration.grid_checks import Trained, gradient_faults, plan_faults, refusal_faults
from tests.support.installed import found_once
from tests.support.training import Seen, train_many

#: Seconds for the runs of one variant on one number of ranks; a busy machine takes many times an idle one's.
PATIENCE = 1800.0
HEAD = (
    "| schedule | P | shapes | refused | runs | order, peaks, messages | gradients | all bits equal | loss, largest |"
)


def run(product: Sequence[Case], every: Sequence[Shape]) -> int:
    """Train ``product`` and its references, ask for each refused shape of ``every``; returns the exit code."""
    start = time.perf_counter()
    cases = [case for case in product if case.reference != case]
    references = sorted({case.reference for case in cases})
    alone = {case: ranks[0] for case, ranks in trained(references)}
    done, faults = [Trained(case, [seen], seen) for case, seen in alone.items()], list[str]()

    def tell(found: Iterable[str]) -> None:  # at once: a grid that is stopped has shown what it found
        for fault in found:
            faults.append(fault)
            print(fault, file=sys.stderr, flush=True)

    for each in done:
        tell(each.faults())
    for case, ranks in trained(cases):
        done.append(Trained(case, ranks, alone[case.reference]))
        tell(done[-1].faults())
    with found_once():
        refused = [shape for shape in every if not shape.accepted]
        tell(fault for shape in refused for fault in refusal_faults(shape))
    print_table(done, every)
    print("\n".join(["", *summary(done, len(refused), faults), f"- wall time: {time.perf_counter() - start:.0f} s"]))
    return 1 if faults else 0


def trained(cases: Sequence[Case]) -> Iterator[tuple[Case, list[Seen]]]:
    """Train ``cases``, those of one variant and one number of ranks in the same processes."""

    def batch(case: Case) -> tuple[int, str]:
        return case.world, str(case.variant)

    for key, group in groupby(sorted(cases, key=batch), batch):
        members = list(group)
        print(f"{len(members)} runs on {key[0]} rank(s), {key[1]}", file=sys.stderr, flush=True)
        yield from zip(members, train_many(key[0], [case.request for case in members], timeout=PATIENCE), strict=True)


def print_table(done: Sequence[Trained], every: Sequence[Shape]) -> None:
    """One line for each schedule and number of stages."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(HEAD + "\n" + "|---" * HEAD.count(" | ") + "|---|")
    for schedule in RULES:
        for stages in sorted({shape.stages for shape in every}):
            mine = [each for each in done if (each.case.shape.schedule, each.case.shape.stages) == (schedule, stages)]
            asked = [shape for shape in every if (shape.schedule, shape.stages) == (schedule, stages)]
            refused = sum(not shape.accepted for shape in asked)
            print(f"| {schedule} | {stages} | {len(asked)} | {refused} | {len(mine)} | {figures(mine)} |")


def figures(done: Sequence[Trained]) -> str:
    """The last cells of a line: how many runs are right, and how far the losses are."""
    if not done:
        return "- | - | - | -"
    planned = sum(not any(plan_faults(each)) for each in done)
    gradients = sum(not any(gradient_faults(each)) for each in done)
    equal = sum(each.bit_equal for each in done)
    return f"{planned} | {gradients} | {equal} | {np.max([each.loss_difference for each in done]):.1e}"


def summary(done: Sequence[Trained], refused: int, faults: Sequence[str]) -> list[str]:
    """What the table adds up to."""
    pipelines = [each for each in done if each.case.shape.schedule != "sequential"]
    untied = [each for each in pipelines if not each.case.variant.tied]
    everywhere, tied_apart = (sum(each.bit_equal for each in some) for some in (pipelines, untied))
    return [
        f"- combinations trained: {len(done)}, of which {len(done) - len(pipelines)} sequential references",
        f"- shapes refused, with what to type instead: {refused}",
        f"- largest difference of a loss: {np.max([0.0, *(each.loss_difference for each in pipelines)]):.2e}",
        f"- first gradients equal bit for bit without tied embeddings: {tied_apart} of {len(untied)} pipelines",
        f"- first gradients equal bit for bit, a tied embedding's too: {everywhere} of {len(pipelines)} pipelines",
        f"- faults: {len(faults)}",
    ]


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(run(whole_product(), list(shapes())))
