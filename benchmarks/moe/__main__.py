"""Compares a layer of experts with a naive loop over experts and with Hugging Face's Mixtral block.

    python -m benchmarks.moe [--quick] > benchmarks/results/moe.md

Prints the tables of ``results/moe.md``: how long a forward and backward takes on each side, and the goals beside what
was measured. Hugging Face's sides need transformers (``pip install -c constraints.txt transformers``); without it they
are left out. A sample during which something else used more than a twentieth of the cores is dropped. On two quiet
cores this takes about two minutes, and ``--quick``, with fewer samples, about one.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.moe.speed import report
from benchmarks.support.report import heading


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    given = parser.parse_args()
    for line in heading("Mixture of experts", (parser.prog, *sys.argv[1:])):
        print(line, flush=True)
    for line in report(quick=given.quick):
        print(line, flush=True)


if __name__ == "__main__":
    main()
