"""Compares samples whose tokens are split over two ranks with whole ones, split layers and torch's own ring.

    python -m benchmarks.context [--quick] [--only time messages memory]

Prints the tables of ``results/context.md``: how long a forward and backward takes by length of sequence and by method,
and the goals beside what was measured; the bytes that a rank sends beside their formula; and what a rank holds of a
sample between forward and backward, and at most.

A sample during which something else used more than a twentieth of the cores is dropped. On two quiet cores this takes
about twelve minutes, and ``--quick``, with fewer samples, about five.
"""

from __future__ import annotations

from benchmarks.context import memory, messages, speed
from benchmarks.support.command import run

if __name__ == "__main__":
    run(
        "context",
        "Context parallelism",
        __doc__ or "",
        {"time": speed.report, "messages": messages.report, "memory": memory.report},
    )
