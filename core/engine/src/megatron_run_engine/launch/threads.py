"""How many CPU threads each rank gets, and the environment that must stand before a rank starts.

What they bring was measured: ``python -m benchmarks.single --only settings waiting``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Literal

#: Freed memory stays with the process, in huge pages: the system clears each page that it hands out, which takes longer
#: than many a kernel that writes it. The last is the size of free memory, 32 GiB, above which some is handed back.
KEEPING = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=34359738368"
#: How often a waiting thread of GNU's OpenMP looks before it sleeps: some microseconds, where it would be milliseconds.
BRIEFLY = "1000"
#: Who sets one of these knows better: glibc's own settings, and another allocator in its place.
_ALLOCATORS = ("MALLOC_", "LD_PRELOAD")


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
    """``base`` with the variables that OpenMP, MKL, gloo and glibc's allocator read when a rank starts.

    Threads that wait sleep at once when ranks x threads exceed the cores: spinning then takes the cores from the
    threads that work. Else they spin briefly, since whatever else runs here needs a core too. What the user has set of
    all but the threads stays.
    """
    environment = {**base, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if local_size * threads > cores:
        environment.setdefault("OMP_WAIT_POLICY", "passive")
    elif "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", BRIEFLY)
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    quiet_torch(environment)
    keep_memory(environment)
    return environment


def keep_memory(environment: MutableMapping[str, str]) -> None:
    """Before a rank starts: its allocator keeps what is freed, where the allocator is glibc's and not told anything."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    if not _has_glibc() or "glibc.malloc." in tunables or any(name.startswith(_ALLOCATORS) for name in environment):
        return
    environment["GLIBC_TUNABLES"] = f"{tunables}:{KEEPING}" if tunables else KEEPING


def _has_glibc() -> bool:
    name = "CS_GNU_LIBC_VERSION"
    return name in getattr(os, "confstr_names", {}) and bool(os.confstr(name))


def quiet_torch(environment: MutableMapping[str, str]) -> None:
    """Before torch is imported: keep back its C++ warnings about peers that are late or gone, of which we say one line.

    A level that the user has set stays.
    """
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
