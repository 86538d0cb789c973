"""One rank of a measurement: calls the function that its job names; rank 0 writes what it returns, a line of JSON.

    python -m benchmarks.support.rank JOB.json

``benchmarks/support/ranks.py`` writes the job and starts the ranks; rank and world come from the environment.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    """Join the other ranks, measure, write."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    measurement = getattr(importlib.import_module(job["module"]), job["function"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "nccl" in job["backend"]:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        job["backend"], init_method=f"file://{job['store']}", rank=rank, world_size=world, timeout=timedelta(minutes=10)
    )
    with Path(job["results"]).open("a", encoding="utf-8") as lines:
        if rank == 0:
            print(file=lines, flush=True)  # the ranks have met
        found = measurement(**job["arguments"])
        for result in found if isinstance(found, Iterator) else [found]:
            if rank == 0:
                lines.write(json.dumps(result) + "\n")
                lines.flush()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # what is left is tearing down


if __name__ == "__main__":
    main()
