"""Ranks that a guard has named are written into the run folder, for the next start to leave out: ``guard.exclude``."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_run.contracts.schema import ParallelSection
from megatron_run.errors import RunError
from megatron_run.planning.elastic import strengths
from megatron_run_engine.checkpoint.collectives import on_rank0
from megatron_run_engine.run_folder.excluded import NAME, Excluded, exclude, now
from megatron_run_engine.training.health.replicas import ranks_text

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.runtime.world import World


def left_out(ranks: Sequence[int]) -> str:
    """The end of a line about ``ranks`` that are recorded."""
    return f"the next start leaves {ranks_text(ranks)} out, by {NAME} in the run folder"


class Exclusion:
    """The record of ``folder``, as the ``ranks`` of ``run`` keep it; this one runs as ``world`` says. Collective."""

    def __init__(self, run: ResolvedRun, folder: RunFolder, world: World, ranks: Ranks) -> None:
        self._run, self._folder, self._ranks = run, folder, ranks
        notes = ranks.gather(json.dumps([world.host, world.local_rank]))
        self._places = [Excluded(*json.loads(note)) for note in notes]  # on rank 0

    def named(self, ranks: Collection[int]) -> str:
        """Where ``ranks`` are, for people. Collective."""
        return on_rank0(self._ranks, lambda: " and ".join(self._places[rank].named for rank in ranks))

    def asked(self, reason: str) -> bool:
        """Whether ranks are left out for that ``reason``."""
        return reason in self._run.config.guard.exclude

    def record(self, ranks: Collection[int], step: int, reason: str) -> str:
        """Record ``ranks``, found after ``step``; empty, or why they cannot be left out. Collective."""

        def write() -> str:
            attempt, found = self._folder.attempt, [replace(self._places[rank], rank=rank) for rank in ranks]
            entries = (replace(each, step=step, attempt=attempt, reason=reason, time=now()) for each in found)
            try:
                self._check_others(len(ranks))
                exclude(self._folder, entries)
            except RunError as failure:
                return f"{ranks_text([*ranks])} cannot be left out: {failure}"
            return ""

        return on_rank0(self._ranks, write)

    def _check_others(self, out: int) -> None:
        """Raise :class:`megatron_run.errors.InputError` where no layout is without so many ranks: no start would be."""
        config, there = self._run.config, self._run.sizes.world + self._run.spares
        parallel = config.parallel if config.run.elastic == "data" else ParallelSection()  # the planner finds another
        strengths(config.run, parallel, config.train, there - out)
