"""Compares training in one process with Hugging Face's GPT-2, nanoGPT, megatron-core and a bare loop.

    python -m benchmarks.single [--quick] [--only speed memory settings attention] > benchmarks/results/single.md

Prints the tables of ``results/single.md``, one module of this package each:

- speed: rate of a training step against every peer, in fp32 and bf16, and the goals beside what was measured;
- memory: peak resident memory of each side;
- settings: what the allocator's settings bring that the launcher makes;
- attention: the fused kernel against two batched matrix products, by type, length and dropout.

Hugging Face's side needs transformers (``pip install -c constraints.txt transformers``), megatron-core's needs it on
the path (``pip install --no-deps --target FOLDER megatron-core`` and ``PYTHONPATH=FOLDER``); without them they are left
out. A sample during which something else used more than a twentieth of the cores is dropped. On two quiet cores
everything takes about twelve minutes, and ``--quick``, with fewer samples, about four.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.single import attention, memory, settings, speed
from benchmarks.support.report import heading

PARTS = {"speed": speed.report, "memory": memory.report, "settings": settings.report, "attention": attention.report}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.single", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    given = parser.parse_args()
    for line in heading("One process", (parser.prog, *sys.argv[1:])):
        print(line, flush=True)
    for part in given.only:
        for line in PARTS[part](quick=given.quick):
            print(line, flush=True)


if __name__ == "__main__":
    main()
