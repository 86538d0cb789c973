"""The measured tables: dense shapes in one machine, models over many machines, and a published table."""

from __future__ import annotations

import csv
from pathlib import Path

from megatron_run_planner.accuracy import Measured, read_table
from megatron_run_planner.workload import ModelSplit, gpt2

TABLES = Path(__file__).parents[2] / "tests" / "planner" / "tables"
VOCABULARY, MEMORY = 51200, 80 * 2**30


def measured(name: str) -> list[Measured]:
    """The rows of ``single`` (2 to 8 GPUs) or ``multi`` (256 and 512 GPUs)."""
    return read_table(TABLES / f"a100_{name}.csv", VOCABULARY, None, MEMORY)


def narayanan() -> list[Measured]:
    """Table 1 of Narayanan et al. 2021: full recomputation, sequences of 2,048 tokens."""
    found = []
    with (TABLES / "narayanan_2021.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            ways = int(row["tensor"]) * int(row["pipeline"])
            model = gpt2(int(row["layers"]), int(row["hidden"]), int(row["heads"]), 2048, VOCABULARY)
            split = ModelSplit(
                tensor=int(row["tensor"]),
                pipeline=int(row["pipeline"]),
                chunks=int(row["chunks"]),
                data=int(row["GPUs"]) // ways,
                micro_batch=int(row["micro batch"]),
                global_batch=int(row["global batch"]),
                recompute="full",
                scatter_messages=True,
            )
            found.append(Measured(model, split, float(row["seconds"])))
    return found
