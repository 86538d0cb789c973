"""Do runs whose parameters are whole only where a segment needs them train what ``zero1`` does? However arranged.

    make sharded-grid

Of ``sharded_grid.py``'s product each pair of two choices, and others until there are 240, or the number that follows
the command ``python -m tests.integration.whole_sharded_grid``. Prints a table, and exits with 1 if something is wrong.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter

from tests.integration.sharded_grid import FEATURES, Split, selection, trained

COUNT = 240


def run(splits: list[Split]) -> int:
    """Train ``splits`` and their references; returns the exit code."""
    start, wrong, faults = time.perf_counter(), set[Split](), 0
    whole = {each.split: each for each in trained(list(dict.fromkeys(split.whole for split in splits)))}
    for number, each in enumerate(trained(splits), 1):
        for fault in each.faults(whole[each.split.whole]):  # at once: a grid that is stopped has shown what it found
            print(fault, file=sys.stderr, flush=True)
            wrong.add(each.split)
            faults += 1
        if number % 20 == 0:
            print(f"{number} of {len(splits)}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    tried, bad = (Counter(split.feature for split in some) for some in (splits, wrong))
    print("| feature | runs | as zero1 |\n|---|---|---|")
    for feature in FEATURES:
        if tried[feature]:
            print(f"| {feature} | {tried[feature]} | {tried[feature] - bad[feature]} |")
    exact = sum(split.exact for split in splits)
    print(f"\n- runs: {len(splits)}, {exact} of them compared to the bit; {len(wrong)} differ\n- faults: {faults}")
    print(f"- wall time: {time.perf_counter() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(run(selection(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT)))
