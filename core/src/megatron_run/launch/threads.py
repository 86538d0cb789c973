"""How many CPU threads each rank gets, and the environment that must stand before a rank starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Literal


def available_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota(Path("/sys/fs/cgroup/cpu.max")) or cores))


def _quota(path: Path) -> int | None:
    """Whole cores of a cgroup's ``cpu.max`` (``QUOTA PERIOD`` in microseconds), None when there is no limit."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def threads_per_rank(setting: int | Literal["auto"], local_size: int, cores: int | None = None) -> int:
    """The value of ``run.threads``, by default cores / local ranks and at least 1."""
    if setting != "auto":
        return setting
    return max(1, (cores or available_cores()) // local_size)


def rank_environment(base: Mapping[str, str], threads: int, local_size: int, cores: int) -> dict[str, str]:
    """``base`` with the variables that OpenMP, MKL and gloo read when a rank starts.

    Threads that wait do not spin when ranks x threads exceed the cores: spinning then makes a step 2-4 times longer,
    and saves only 3-9% where every thread has its core. What the user has set of the last two stays.
    """
    environment = {**base, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if local_size * threads > cores:
        environment.setdefault("OMP_WAIT_POLICY", "passive")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    quiet_torch(environment)
    return environment


def quiet_torch(environment: MutableMapping[str, str]) -> None:
    """Before torch is imported: keep back its C++ warnings about peers that are late or gone, of which we say one line.

    A level that the user has set stays.
    """
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
