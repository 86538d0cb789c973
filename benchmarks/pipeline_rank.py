"""One rank of ``benchmarks/pipeline.py``: measures what its arguments name, and rank 0 writes the result as JSON.

    python -m benchmarks.pipeline_rank JOB.json

The job holds ``what`` (a key of ``MEASUREMENTS``), ``store``, ``result`` and the arguments of the measurement; rank
and world come from the environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pipeline_overhead import measure_overhead
from benchmarks.pipeline_pairs import measure_memory, measure_pairs
from benchmarks.pipeline_sleep import measure_sleep

MEASUREMENTS: dict[str, Callable[..., object]] = {
    "pairs": measure_pairs,
    "memory": measure_memory,
    "overhead": measure_overhead,
    "sleep": measure_sleep,
}


def main() -> None:
    """Join the other ranks, measure, write."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{job['store']}", rank=rank, world_size=world, timeout=timedelta(minutes=10)
    )
    result = MEASUREMENTS[job["what"]](**job["arguments"])
    if rank == 0:
        Path(job["result"]).write_text(json.dumps(result), "utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # what is left is tearing down


if __name__ == "__main__":
    main()
