"""A run's steps in the memory of its hosts: more often than on disk, and what a restart reads first."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from megatron_run.errors import CheckpointError, InputError
from megatron_run_engine.checkpoint.async_saver import AsyncSaver, Staging
from megatron_run_engine.checkpoint.collectives import WorldRanks, on_all_ranks, on_rank0
from megatron_run_engine.checkpoint.hosts import Hosts
from megatron_run_engine.checkpoint.memory_folder import memory_folder
from megatron_run_engine.checkpoint.memory_home import MemoryHome, not_on_disk
from megatron_run_engine.checkpoint.memory_saver import MemorySaver
from megatron_run_engine.checkpoint.survivors import Found, Survivors
from megatron_run_engine.runtime.comm import create_aside, patience
from megatron_run_engine.training.state.resuming import files_at_once, files_read

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from megatron_run.contracts.optimizer import StatePiece
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.checkpoint.manifest import About, Manifest
    from megatron_run_engine.checkpoint.saving import Shapes
    from megatron_run_engine.checkpoint.step_folder import Checkpoints
    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.training.build import Assembly


class MemoryTier:
    """The steps of ``run`` in memory, seen from one of its ranks. Every method is collective but :meth:`remove`.

    Raises :class:`InputError` where a host has no folder for them.
    """

    def __init__(self, run: ResolvedRun, assembly: Assembly, folder: RunFolder) -> None:
        self._run, self._assembly, self._folder = run, assembly, folder
        context = assembly.context
        self._log, self._activity = context.log, context.groups.activity
        rank, size = context.topology.rank, context.topology.sizes.world
        self._ranks = WorldRanks(context.groups, rank, size, context.device)
        self._home = self._make_home(folder)
        self._hosts = self._meet()
        self._leads = self._hosts.leads(rank)
        background = self._activity.in_background()
        # A process group of its own, as for asynchronous saves to the disk, which may be under way at the same time.
        aside = create_aside(size, timedelta(seconds=patience(run.config.run.timeout)), background)
        ranks = WorldRanks(aside, rank, size, torch.device("cpu"))
        saver = MemorySaver(self._home, self._hosts, ranks, aside, background, files_of_rank=files_at_once())
        self._saver = AsyncSaver(saver, Staging(context.device), background, self._activity)
        beat = self._activity.heartbeat
        self._survivors = Survivors(self._home, self._hosts, self._ranks, aside, self._log.warning, heartbeat=beat)
        self._failing = False  # whether the last step did not fit

    def _make_home(self, folder: RunFolder) -> MemoryHome:
        def make() -> MemoryHome:
            home = MemoryHome(memory_folder(self._run.config.checkpoint), folder.run_id, folder.path)
            home.make()
            return home

        try:
            return on_all_ranks(self._ranks, make)
        except CheckpointError as error:  # on whichever host: the configuration names a folder that will not do
            raise InputError(error.what, why=error.why, origin=error.origin, fix=error.fix) from error

    def _meet(self) -> Hosts:
        """The hosts, by the tokens that the ranks see."""
        notes = self._ranks.gather(json.dumps(on_all_ranks(self._ranks, self._home.token)))
        return Hosts.seeing(json.loads(on_rank0(self._ranks, lambda: json.dumps([json.loads(each) for each in notes]))))

    def check_on_disk(self, step: int, checkpoints: Checkpoints) -> None:
        """Raise :class:`CheckpointError` where ``step``, asked for by its number, is in memory alone."""

        def check() -> str:
            held = self._home.steps.steps()
            if step in held and step not in checkpoints.steps():
                raise not_on_disk(step, max(held))
            return ""

        on_rank0(self._ranks, check)

    def find(self, on_disk: int | None) -> Found | None:
        """The step to resume from, if memory has one that is as new as the newest ``on_disk``.

        Raises :class:`CheckpointError` where asking which files are read has left no initial values to begin with.
        """
        if self._leads:
            for line in self._home.sweep():
                self._log.info("%s", line)
            if line := self._home.forget_undone(self._folder.attempts_begun):
                self._log.warning("%s", line)
        asked = list[int]()

        def read_by(manifest: Manifest) -> Collection[str]:
            asked.append(manifest.about.step)
            return files_read(self._run, self._assembly, manifest, self._ranks)

        found = self._survivors.find(on_disk or 1, read_by)
        if asked and found is None and on_disk is None:
            if lacking := self._survivors.lacks_room:
                raise CheckpointError(
                    f"step {asked[0]} in memory cannot be used, and no other step is saved",
                    why=f"a host has no room for what it lacks of it: {lacking}",
                    fix="make room there and run the same command again, or start again: --resume never",
                )
            raise CheckpointError(
                f"step {asked[0]} in memory is not what it was, and no other step is saved",
                fix="what is damaged is removed: the same command begins with the first step",
            )
        return found

    def save(self, about: About, pieces: Iterable[StatePiece], shapes: Shapes) -> None:
        """Begin to save a step, once the one before is saved. A step that does not fit is left out, with a warning."""
        self.wait()
        self._saver.start(about, pieces, shapes)

    def wait(self) -> bool:
        """Wait for the step that is being saved; whether the last one was."""
        if not self._saver.busy:
            return not self._failing
        try:
            self._saver.wait()
        except CheckpointError as error:
            if not self._failing:
                self._failing = True
                self._log.warning("%s; training goes on, and the next step is tried", error)
        else:
            if self._failing:
                self._failing = False
                self._log.warning("steps are saved in memory again")
        return not self._failing

    def begin(self, step: int | None) -> None:
        """The run goes on from ``step``, None for the beginning: what comes after it is removed."""
        if self._leads:
            self._home.begun(self._folder.attempt, step)

    def forget(self, after: int) -> None:
        """Remove the steps after ``after``: the run goes back there, and does them again."""
        self.wait()
        if self._leads:
            self._home.forget(after)

    def remove(self) -> None:
        """Remove all steps of the run from this host: it ends with a step on disk, or with what nobody should resume.

        Call it where no rank saves any more.
        """
        if self._leads:
            self._home.remove()
