"""The variables that must stand before a rank's libraries are loaded, and the cores that its threads share.

The choice was measured: ``python -m benchmarks.single --only settings waiting``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from megatron_run.errors import InputError
from megatron_run.files.user_cache import keep_compiled
from megatron_run_engine.host.environments import find_world

#: Keep freed memory, in huge pages: page zeroing costs more than many kernels. The last is the size of free memory,
#: 32 GiB, above which some is handed back.
KEEP_FREED = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=34359738368"
#: How often a waiting thread of GNU's OpenMP looks before it sleeps: some microseconds, where it would be milliseconds.
SPIN_BRIEFLY = "1000"
#: The number of looks that a launcher has chosen, beside it: a crowded rank takes it back, but not a user's.
CHOSEN = "_MEGATRON_RUN_SPINCOUNT"
#: Whoever sets one of these has tuned the allocator: glibc's own settings, and another allocator in its place.
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

    When oversubscribed (ranks x threads exceed the cores), idle OpenMP threads sleep at once: spinning would take the
    cores from threads that work. Otherwise they spin briefly, since whatever else runs here needs a core too. What the
    user has set of all but the threads stays.
    """
    environment = {**base, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    _set_waiting(environment, crowded=local_size * threads > cores)
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    _prepare_torch(environment)
    tunables = environment.get("GLIBC_TUNABLES", "")
    tuned = "glibc.malloc." in tunables or any(name.startswith(_ALLOCATORS) for name in environment)
    if _has_glibc() and not tuned:
        environment["GLIBC_TUNABLES"] = f"{tunables}:{KEEP_FREED}" if tunables else KEEP_FREED
    return environment


def _has_glibc() -> bool:
    name = "CS_GNU_LIBC_VERSION"
    return name in getattr(os, "confstr_names", {}) and bool(os.confstr(name))


def prepare_process(environment: MutableMapping[str, str]) -> None:
    """Give this process, which is about to import torch, what :func:`rank_environment` gives a local rank.

    It is the rank that ``environment`` describes, or the only one. glibc's allocator and gloo are left out: the former
    has read its variables, and the ranks of other hosts are not found by the loopback interface.
    """
    world = None
    with suppress(InputError):  # who starts the rank will say what is wrong
        world = find_world(environment)
    local_size = world.local_size if world is not None else 1
    threads = environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank("auto", local_size)))
    environment.setdefault("MKL_NUM_THREADS", threads)
    crowded = threads.isdecimal() and local_size * int(threads) > available_cores()
    _set_waiting(environment, crowded=crowded)
    _prepare_torch(environment)


def _set_waiting(environment: MutableMapping[str, str], *, crowded: bool) -> None:
    """How long threads of OpenMP spin that wait; ``crowded``: more threads than cores."""
    if crowded:
        if environment.get("GOMP_SPINCOUNT") == environment.pop(CHOSEN, None):
            environment.pop("GOMP_SPINCOUNT", None)  # stronger than a policy
        environment.setdefault("OMP_WAIT_POLICY", "passive")
    elif not environment.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        environment.update({"GOMP_SPINCOUNT": SPIN_BRIEFLY, CHOSEN: SPIN_BRIEFLY})


def _prepare_torch(environment: MutableMapping[str, str]) -> None:
    """Silence torch's C++ warnings about peers that are late or gone, which we report ourselves.

    A level that the user has set stays. What torch compiles is kept where nobody else writes, if there is such a place.
    """
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with suppress(OSError):
        keep_compiled(environment)
