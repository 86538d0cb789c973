"""Whether the memory of this host has room for the steps that a run keeps there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_run.contracts.topology import Topology
from megatron_run.errors import InputError
from megatron_run_engine.checkpoint.files import size_text
from megatron_run_engine.checkpoint.memory_home import memory_folder
from megatron_run_engine.estimate.model_size import FOR_NEIGHBOUR, IN_MEMORY

if TYPE_CHECKING:
    from collections.abc import Collection

    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.estimate.model_size import ModelSize


def check_room(run: ResolvedRun, size: ModelSize, local: Collection[int]) -> None:
    """Raise :class:`InputError` unless the ``local`` ranks of this host have room for two steps and for copies.

    What steps in memory take already counts as room: they are those of this run, or are removed once it starts.
    """
    section = run.config.checkpoint
    if not section.memory_interval.amount:
        return
    try:
        folder = memory_folder(section)
    except InputError:
        if "$" in str(section.memory_folder):
            return  # the ranks' environments say more
        raise
    roles = (IN_MEMORY,) if len(local) == run.sizes.world else (IN_MEMORY, FOR_NEIGHBOUR)
    stages = [size.stages[Topology(run.sizes, rank).stage].memory for rank in local]
    needed, there = sum(stage.get(role, 0) for stage in stages for role in roles), os.statvfs(folder)
    room = there.f_bavail * there.f_frsize + sum(map(_size, folder.glob(f"megatron-run-{os.geteuid()}/*/*/*")))
    if needed > room:
        raise InputError(
            f"{folder} has no room for two steps of the {len(local)} ranks of this host",
            why=f"they take {size_text(needed)}, and it has {size_text(room)}",
            origin="checkpoint.memory_interval",
            fix="enlarge it (mount -o remount,size=...), name a larger tmpfs with checkpoint.memory_folder, "
            "or do without: --set checkpoint.memory_interval=0",
        )


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0
