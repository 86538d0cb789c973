"""What depends on the device: memory in use, and kernels that give the same bits twice."""

from __future__ import annotations

import resource
import sys

import torch
from torch.utils import deterministic


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process has held: allocated on a GPU, resident on a CPU; GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, KiB on Linux


def make_deterministic(wanted: bool | None, device: str) -> None:
    """Ask PyTorch for deterministic kernels; ``wanted`` None means yes on the CPU, where they cost nothing.

    With them comes a fill of every tensor that a kernel is about to write, which finds kernels that read what nobody
    wrote, and makes a step some 5% longer: left out.
    """
    torch.use_deterministic_algorithms(device == "cpu" if wanted is None else wanted)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # torch hides it behind a class
