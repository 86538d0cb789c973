"""Compares saving and loading with torch's, and tells what a save in the background costs the training.

    python -m benchmarks.checkpoint [--quick] [--only disk memory stall]

Prints the tables of ``results/checkpoint.md``: how fast the state of a training is saved and loaded, every byte
hashed, beside ``torch.distributed.checkpoint`` and ``torch.save`` of the same tensors, on the disk of the temporary
folder and in memory; the goals beside what was measured; and for how many steps a training stands still when it saves
at once and when it saves in the background.

A sample during which something else used more than a twentieth of the cores is dropped. On two quiet cores this takes
about eight minutes, and ``--quick``, with fewer samples, about three. ``TMPDIR`` chooses another disk.
"""

from __future__ import annotations

from benchmarks.checkpoint import speed, stall
from benchmarks.support.command import run

if __name__ == "__main__":
    run(
        "checkpoint",
        "Checkpoints",
        __doc__ or "",
        {"disk": speed.on_the_disk, "memory": speed.in_memory, "stall": stall.report},
    )
