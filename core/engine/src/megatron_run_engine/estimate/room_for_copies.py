"""Whether the memory of this host has room for the steps that a run keeps there, and is memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megatron_run.contracts.topology import Topology
from megatron_run.errors import InputError
from megatron_run_engine.checkpoint.files import size_text
from megatron_run_engine.checkpoint.memory_folder import disk_under, memory_folder, reclaimable
from megatron_run_engine.checkpoint.memory_home import check_home
from megatron_run_engine.estimate.model_size import FOR_NEIGHBOUR, IN_MEMORY

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.estimate.model_size import ModelSize


def check_folder(run: ResolvedRun) -> str:
    """A line where steps in memory would lie on a disk; else empty. Raises :class:`InputError` for a bad folder."""
    folder = _folder(run)
    if folder is None:
        return ""
    check_home(folder, _run_folder(run))
    if not (disk := disk_under(folder)):
        return ""
    why = f"checkpoint.memory_interval keeps steps in {folder}, which is no memory but a disk ({disk})"
    return f"{why}: name a folder of a tmpfs with checkpoint.memory_folder"


def check_room(run: ResolvedRun, size: ModelSize, local: Collection[int]) -> None:
    """Raise :class:`InputError` unless the ``local`` ranks of this host have room for two steps and for copies.

    What this run has there counts as room, and so do homes that it removes once it starts, but no other runs' steps.
    """
    folder = _folder(run)
    if folder is None:
        return
    roles = (IN_MEMORY,) if len(local) == run.sizes.world else (IN_MEMORY, FOR_NEIGHBOUR)
    stages = [size.stages[Topology(run.sizes, rank).stage].memory for rank in local]
    needed, there = sum(stage.get(role, 0) for stage in stages for role in roles), os.statvfs(folder)
    room = there.f_bavail * there.f_frsize + reclaimable(folder, _run_folder(run))
    if needed > room:
        raise InputError(
            f"{folder} has no room for two steps of the {len(local)} ranks of this host",
            why=f"they take {size_text(needed)}, and it has {size_text(room)}",
            origin="checkpoint.memory_interval",
            fix="enlarge it (mount -o remount,size=...), name a larger tmpfs with checkpoint.memory_folder, "
            "or do without: --set checkpoint.memory_interval=0",
        )


def _folder(run: ResolvedRun) -> Path | None:
    """The folder of this host; None where none is needed, or the ranks' environments alone say which it is."""
    section = run.config.checkpoint
    if not section.memory_interval.amount:
        return None
    try:
        return memory_folder(section)
    except InputError:
        if "$" in str(section.memory_folder):
            return None
        raise


def _run_folder(run: ResolvedRun) -> Path | None:
    folder = run.config.run.folder
    return folder and folder.expanduser().absolute()
