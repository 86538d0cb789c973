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
from functools import partial
from pathlib import Path

from tests.integration.context_grid import FEATURES, Split, selection, write_texts
from tests.integration.context_grid_checks import trained
from tests.integration.whole_report import compare

COUNT = 320


def run(splits: list[Split]) -> int:
    """Train ``splits`` and their references; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder))
        train = partial(trained, texts=Path(folder))
        return compare(splits, train, lambda split: split.alone, FEATURES, "as the single process")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(run(selection(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT)))
