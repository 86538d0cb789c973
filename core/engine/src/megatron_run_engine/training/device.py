"""Device-dependent helpers: peak memory and deterministic kernels."""

from __future__ import annotations

import resource
import sys

import torch
from torch.utils import deterministic


def peak_memory_gib(device: torch.device) -> float:
    """Return this process's peak memory in GiB: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, KiB on Linux


def make_deterministic(wanted: bool | None, device: str) -> None:
    """Select PyTorch's deterministic kernels. ``wanted=None`` selects them on the CPU, where they cost nothing."""
    torch.use_deterministic_algorithms(device == "cpu" if wanted is None else wanted)
    # By default deterministic mode also fills every new tensor, to expose kernels that read uninitialized memory. That
    # makes a step some 5% slower and changes no result, so it is off.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # torch hides it behind a class
