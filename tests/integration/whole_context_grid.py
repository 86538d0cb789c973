"""Do ranks that split the tokens of samples train what a single process does? With each feature, however arranged.

    make context-grid

Of ``context_grid.py``'s product each pair of two choices, and others until there are 320, or the number that follows
the command ``python -m tests.integration.whole_context_grid``: losses, gradient norms, evaluations, and the weights
after the last step. Prints a table, and exits with 1 when something is wrong. Two cores need half an hour.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.integration.context_grid import FEATURES, Split, selection, write_texts
from tests.integration.context_grid_checks import trained

COUNT = 320


def run(splits: list[Split]) -> int:
    """Train ``splits`` and their references; returns the exit code."""
    start, wrong, faults = time.perf_counter(), set[Split](), 0
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder)
        write_texts(texts)
        alone = {each.split: each for each in trained(list(dict.fromkeys(split.alone for split in splits)), texts)}
        for number, each in enumerate(trained(splits, texts), 1):
            for fault in each.faults(
                alone[each.split.alone]
            ):  # at once: a grid that is stopped has shown what it found
                print(fault, file=sys.stderr, flush=True)
                wrong.add(each.split)
                faults += 1
            if number % 20 == 0:
                print(f"{number} of {len(splits)}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    tried, bad = (Counter(split.feature for split in some) for some in (splits, wrong))
    print("| feature | runs | as the single process |\n|---|---|---|")
    for feature in FEATURES:
        if tried[feature]:
            print(f"| {feature} | {tried[feature]} | {tried[feature] - bad[feature]} |")
    print(f"\n- runs: {len(splits)}, of which differ: {len(wrong)}\n- faults: {faults}")
    print(f"- wall time: {time.perf_counter() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(run(selection(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT)))
