"""Compares layers split over two ranks with whole ones on one rank, with DTensor and with megatron-core's layers.

    python -m benchmarks.tensor_parallel [--quick]

Prints the tables of ``results/tensor_parallel.md``: how long a forward and backward takes on each side, the goals
beside what was measured, and the bytes that cross ranks beside their formula.

With megatron-core on the path (``pip install --no-deps --target FOLDER megatron-core`` and ``PYTHONPATH=FOLDER``) its
layers are one more side. A sample during which something else used more than a twentieth of the cores is dropped.
On two quiet cores this takes about ten minutes, and ``--quick``, with fewer samples, about three.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.support.report import heading
from benchmarks.tensor_parallel.speed import report


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tensor_parallel", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    given = parser.parse_args()
    for line in heading("Tensor parallelism", (parser.prog, *sys.argv[1:])):
        print(line, flush=True)
    for line in report(quick=given.quick):
        print(line, flush=True)


if __name__ == "__main__":
    main()
