"""Ranks that a guard has named are written into the run folder, for the next start to leave out: ``guard.exclude``."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_run.errors import RunError
from megatron_run_engine.checkpoint.collectives import on_rank0
from megatron_run_engine.run_folder.excluded import NAME, Excluded, exclude, now
from megatron_run_engine.training.health.replicas import ranks_text

if TYPE_CHECKING:
    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.runtime.world import World


def left_out(ranks: Sequence[int]) -> str:
    """The end of a line about ``ranks`` that are recorded."""
    return f"the next start leaves {ranks_text(ranks)} out, by {NAME} in the run folder"


class Exclusion:
    """The record of ``folder``, as the ``ranks`` of a run keep it; this one runs as ``world`` says. Collective."""

    def __init__(self, asked: Collection[str], folder: RunFolder, world: World, ranks: Ranks) -> None:
        self._asked, self._folder, self._ranks = asked, folder, ranks
        notes = ranks.gather(json.dumps([world.host, world.local_rank]))
        self._places = [Excluded(*json.loads(note)) for note in notes]  # on rank 0

    def named(self, ranks: Collection[int]) -> str:
        """Where ``ranks`` are, for people. Collective."""
        return on_rank0(self._ranks, lambda: " and ".join(self._places[rank].named for rank in ranks))

    def asked(self, reason: str) -> bool:
        """Whether ranks are left out for that ``reason``."""
        return reason in self._asked

    def record(self, ranks: Collection[int], step: int, reason: str) -> str:
        """Record ``ranks``, found after ``step``; empty, or why that could not be written. Collective."""

        def write() -> str:
            attempt, found = self._folder.attempt, [replace(self._places[rank], rank=rank) for rank in ranks]
            entries = (replace(each, step=step, attempt=attempt, reason=reason, time=now()) for each in found)
            try:
                exclude(self._folder, entries)
            except RunError as failure:
                return str(failure)
            return ""

        return on_rank0(self._ranks, write)
