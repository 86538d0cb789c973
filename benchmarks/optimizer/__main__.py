"""Compares the optimizers with torch's data parallelism and with DeepSpeed.

    python -m benchmarks.optimizer [--quick]

Prints the tables of ``results/optimizer.md``: the time of a step on two ranks with every optimizer, how much of the
communication is hidden, the goals beside what was measured, and the bytes of optimizer state beside their formula;
for a step that has much to compute, and for one that has much to send.

Where DeepSpeed is installed (``DS_BUILD_OPS=0 pip install deepspeed``) it is one more side. A sample during which
something else used more than a twentieth of the cores is dropped. On two quiet cores this takes about ten minutes, and
``--quick``, with fewer samples, about four.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.optimizer.speed import report
from benchmarks.support.report import heading


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizer", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    given = parser.parse_args()
    for line in heading("Optimizers", (parser.prog, *sys.argv[1:])):
        print(line, flush=True)
    for line in report(quick=given.quick):
        print(line, flush=True)


if __name__ == "__main__":
    main()
