"""Does a run with captured graphs train what it trains without? In every arrangement and every way to capture.

    make -s graph-grid > benchmarks/results/whole_graph_grid.md

Each arrangement of ``graph_grid.py`` with each network, once eagerly and once in each way: losses, gradient
norms, evaluations and all weights bit for bit, what was captured when, and as many graphs and slots as formulas say.
The test suite runs a selection; this is the whole product, ``python -m tests.integration.whole_graph_grid``. Prints a
page of results, and exits with 1 when something is wrong. Two cores need some twenty minutes.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from benchmarks.support.report import heading, table
from tests.integration.graph_grid import Arrangement, Case, whole_product
from tests.integration.graph_grid_checks import Compared, bit_faults, byte_faults, capture_faults, number_faults
from tests.support.ranks import RankFailed
from tests.support.training import Seen, train_many

#: Seconds for the runs of one arrangement; a busy machine takes many times an idle one's.
PATIENCE = 1800.0
COMMAND = ("make", "-s", "graph-grid", ">", "benchmarks/results/whole_graph_grid.md")
REORDERED = "a tied embedding's gradients are added up in another order where a V has both ends of the model on a stage"
COLUMNS = ("arrangement", "ranks", "runs", "all bits equal", "right", "captured as planned", "graphs", "slots")


def run(product: Sequence[Case]) -> int:
    """Train ``product`` and what it is compared with; returns the exit code."""
    start, faults, done = time.perf_counter(), list[str](), list[Compared]()
    for line in heading("Graph capture in every arrangement", COMMAND):
        print(line, flush=True)
    print()
    for line in table(COLUMNS, rows(product, done, faults)):
        print(line, flush=True)
    print("\n".join(["", *summary(done, faults), f"- wall time: {time.perf_counter() - start:.0f} s"]))
    return 1 if faults else 0


def rows(product: Sequence[Case], done: list[Compared], faults: list[str]) -> Iterator[tuple[object, ...]]:
    """One line for each arrangement; ``done`` and ``faults`` are added to."""
    for arrangement, group in groupby(product, lambda case: case.arrangement):
        cases = list(group)
        print(f"{len(cases)} runs with graphs: {arrangement}", file=sys.stderr, flush=True)
        try:
            trained = train(arrangement, cases)
        except RankFailed as error:
            faults.append(f"{arrangement}: {error}")
            print(faults[-1], file=sys.stderr, flush=True)
            yield arrangement, arrangement.world, len(cases), 0, 0, 0, "-", "-"
            continue
        mine = [Compared(case, trained[case], trained[case.eager]) for case in cases]
        done += mine
        found = [*(fault for each in mine for fault in each.faults()), *byte_faults(trained)]
        print("\n".join(found), file=sys.stderr, flush=True)
        faults += found
        yield arrangement, arrangement.world, len(mine), *figures(mine)


def train(arrangement: Arrangement, cases: Sequence[Case]) -> Mapping[Case, Sequence[Seen]]:
    """Train ``cases`` and the same without graphs, in the same processes."""
    every = list(dict.fromkeys([*(case.eager for case in cases), *cases]))
    seen = train_many(arrangement.world, [case.request for case in every], timeout=PATIENCE)
    return dict(zip(every, seen, strict=True))


def figures(done: Sequence[Compared]) -> tuple[object, ...]:
    """The last cells of a line: how many runs are right, and how much a rank captures."""
    equal = sum(not any(bit_faults(each)) for each in done)
    right = sum(not any(number_faults(each)) for each in done)
    planned = sum(not any(capture_faults(each)) for each in done)
    sizes = [said.captured for each in done for seen in each.graphed for said in seen.captured]
    return equal, right, planned, spread(size.graphs for size in sizes), spread(size.slots for size in sizes)


def spread(values: Iterator[int]) -> str:
    """From the least to the most."""
    found = sorted(set(values))
    return f"{found[0]} to {found[-1]}" if len(found) > 1 else "".join(map(str, found))


def summary(done: Sequence[Compared], faults: Sequence[str]) -> list[str]:
    """What the table adds up to."""
    cases = [each.case for each in done]
    captures = sum(len(seen.captured) for each in done for seen in each.graphed)
    return [
        f"- runs with graphs: {len(cases)}, compared with {len({case.eager for case in cases})} without",
        f"- captures on a rank: {captures}",
        f"- by network: {shares(case.network for case in cases)}",
        f"- by precision: {shares(case.precision for case in cases)}",
        f"- all bits equal: {sum(not any(bit_faults(each)) for each in done)}",
        f"- {sum(case.reordered for case in cases)} runs whose last bits may differ: {REORDERED}",
        f"- faults: {len(faults)}",
    ]


def shares(values: Iterator[object]) -> str:
    """How many of each."""
    return "; ".join(f"{value} {count}" for value, count in Counter(map(str, values)).items())


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(run(whole_product()))
