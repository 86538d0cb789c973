"""Compares pipelines with torch.distributed.pipelining, and with their own plans.

    python -m benchmarks.pipeline [--quick] [--only pairs memory overhead sleep]

Prints the tables of ``results/pipeline.md``, one module of this package each:

- pairs: step time against peers, on the same chunks;
- memory: peak resident memory of the rank with the loss, against torch;
- overhead: microseconds that the executor adds to an action;
- sleep: four stages whose chunks sleep instead of compute, against the planned time.

With megatron-core on the path (``pip install --no-deps --target FOLDER megatron-core`` and ``PYTHONPATH=FOLDER``) its
1F1B is one more pair. A sample during which something else used more than a twentieth of the cores is dropped.
On two quiet cores everything takes about a quarter of an hour, and ``--quick``, with fewer samples, about six minutes.
"""

from __future__ import annotations

from benchmarks.pipeline import memory, overhead, pairs, sleep
from benchmarks.support.command import run

PARTS = {"pairs": pairs.report, "memory": memory.report, "overhead": overhead.report, "sleep": sleep.report}

if __name__ == "__main__":
    run("pipeline", "Pipelines", __doc__ or "", PARTS)
