"""Do runs whose parameters are whole only where a segment needs them train what ``zero1`` does? However arranged.

    make sharded-grid

Of ``sharded_grid.py``'s product each pair of two choices, and others until there are 240, or the number that follows
the command ``python -m tests.integration.whole_sharded_grid``. Prints a table, and exits with 1 if something is wrong.
"""

from __future__ import annotations

import os
import sys

from tests.integration.sharded_grid import FEATURES, Split, selection, trained
from tests.integration.whole_report import compare

COUNT = 240


def run(splits: list[Split]) -> int:
    """Train ``splits`` and their references; returns the exit code."""
    code = compare(splits, trained, lambda split: split.whole, FEATURES, "as zero1")
    print(f"- compared to the bit: {sum(split.exact for split in splits)}")
    return code


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(run(selection(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT)))
