"""Compares layers split over two ranks with whole ones on one rank, with DTensor and with megatron-core's layers.

    python -m benchmarks.tensor_parallel [--quick]

Prints the tables of ``results/tensor_parallel.md``: how long a forward and backward takes on each side, the goals
beside what was measured, and the bytes that cross ranks beside their formula.

With megatron-core on the path (``pip install --no-deps --target FOLDER megatron-core`` and ``PYTHONPATH=FOLDER``) its
layers are one more side. A sample during which something else used more than a twentieth of the cores is dropped.
On two quiet cores this takes about ten minutes, and ``--quick``, with fewer samples, about three.
"""

from __future__ import annotations

from benchmarks.support.command import run
from benchmarks.tensor_parallel.speed import report

if __name__ == "__main__":
    run("tensor_parallel", "Tensor parallelism", __doc__ or "", report)
