"""What of a run goes into a saved step, when it is saved, and how a run goes on from it."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from megatron_run import __version__
from megatron_run.contracts import CheckpointMetrics
from megatron_run.errors import RunError
from megatron_run_engine.checkpoint.async_saver import AsyncSaver, Staging
from megatron_run_engine.checkpoint.collectives import WorldRanks
from megatron_run_engine.checkpoint.manifest import About, DataRecord
from megatron_run_engine.checkpoint.saving import Saver
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.run_folder.identity import digest, identity
from megatron_run_engine.runtime.comm import create_aside, patience
from megatron_run_engine.training.state.init_from import start_from
from megatron_run_engine.training.state.plugin_lock import plugin_records
from megatron_run_engine.training.state.resuming import files_at_once, resume

if TYPE_CHECKING:
    from megatron_run.contracts import Dataset
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.training.build import Assembly
    from megatron_run_engine.training.numbers import Progress

#: Samples, spread over all, whose contents tell a dataset from another.
_LOOKED_AT = 8


class Checkpointing:
    """The saved steps of one run, seen from one of its ranks; ``dataset`` is what it is trained on."""

    def __init__(self, run: ResolvedRun, assembly: Assembly, folder: RunFolder, dataset: Dataset) -> None:
        self._run, self._assembly, self._folder = run, assembly, folder
        self._data = fingerprint(dataset)
        context, topology = assembly.context, assembly.context.topology
        self._ranks = WorldRanks(context.groups, topology.rank, topology.sizes.world, context.device)
        self._checkpoints, self._activity = Checkpoints(folder.checkpoints), context.groups.activity
        keep = run.config.checkpoint.keep
        threads = files_at_once()
        self._saver = Saver(
            self._checkpoints,
            self._ranks,
            folder.run_id,
            keep,
            activity=self._activity,
            files_of_rank=threads,
            at_once=threads,
        )
        self._behind = self._make_behind() if run.config.checkpoint.async_save else None
        self._stood_still = 0.0  # for the step that is being saved behind the training
        self._saved: list[CheckpointMetrics] = []  # on the disk, and not told yet

    def _make_behind(self) -> AsyncSaver:
        """What saves behind the training: it meets the other ranks in a group that the training does not use."""
        run, context = self._run, self._assembly.context
        rank, size = context.topology.rank, context.topology.sizes.world
        activity = self._activity.beside()
        aside = create_aside(size, timedelta(seconds=patience(run.config.run.timeout)), activity)
        ranks = WorldRanks(aside, rank, size, torch.device("cpu"))
        keep = run.config.checkpoint.keep
        saver = Saver(  # one file after the other: the cores are the training's
            self._checkpoints, ranks, self._folder.run_id, keep, activity=activity, files_of_rank=files_at_once()
        )
        return AsyncSaver(saver, Staging(context.device), activity, self._activity)

    def resume(self) -> Progress:
        """Go on from the step that ``--resume`` names: the newest, one by its number, or none. Collective.

        A run that starts, starts from the weights of ``run.init_from``. Returns how far it had come. Raises
        :class:`megatron_run.errors.CheckpointError` before anything changes.
        """
        with self._activity.within("load"):
            progress = self._load(self._run.request.resume)
            source = self._run.config.run.init_from
            if source is not None and not progress.step:
                start_from(self._run, self._assembly, source, self._ranks, self._shapes())
        self._saver.set_aside(progress.step or None, self._folder.attempt)
        return progress

    def go_back(self) -> Progress | None:
        """Load the newest saved step again, and say how far the run had come; None when none is saved. Collective.

        Raises :class:`megatron_run.errors.CheckpointError` as :meth:`after_step` does.
        """
        if self._behind is not None:
            self._saved += self._take(self._behind, wait=True)  # it is the newest, once it is whole
        progress = self._load("auto")
        return progress if progress.step else None

    def _load(self, word: str) -> Progress:
        with self._activity.within("load"):
            return resume(self._run, self._assembly, self._checkpoints, self._ranks, self._data, word)

    def is_due(self, step: int, last: int) -> bool:
        """Whether ``step`` of ``last`` is one that ``checkpoint.interval`` asks for, or the last."""
        interval = self._run.config.checkpoint.interval.steps(last, self._run.config.train.global_batch_size)
        return step == last or bool(interval and step % interval == 0)

    def after_step(self, progress: Progress, last: int, *, stopping: bool) -> list[CheckpointMetrics]:
        """Save the step that ``progress`` counted last if it is due, if it is the ``last``, or if the run is stopping.

        Collective, after every step. Returns the steps that have come onto the disk since the last call; of a step that
        is saved behind the training that is a later one. Raises :class:`megatron_run.errors.CheckpointError` on every
        rank for one that could not be saved.
        """
        due, final = self.is_due(progress.step, last), stopping or progress.step == last
        if self._behind is None:
            return [self._save(progress)] if due or final else []
        told, self._saved = self._saved, []
        start = time.perf_counter()
        if due or final:
            self._activity.enter("save", f"step{progress.step}")
        saved = [*told, *self._take(self._behind, wait=due or final)]
        if final:
            return [*saved, self._save(progress)]
        if due:
            self._behind.start(self._about(progress), self._assembly.optimizer.iter_state(), self._shapes())
            self._stood_still = time.perf_counter() - start
        return saved

    def close(self) -> None:
        """Wait until no step is half saved. Where it fails now nothing is raised: the run ends for another reason."""
        if self._behind is None or not self._behind.busy:
            return
        log = self._assembly.context.log
        try:
            log.info("step %d is saved", self._behind.wait().step)
        except RunError as error:
            log.warning("%s", error)
        except Exception as error:  # a bug, or a rank that is gone
            what = "a step could not be saved behind the training"
            log.warning("%s: %s: %s", what, type(error).__name__, error, exc_info=True)

    def _save(self, progress: Progress) -> CheckpointMetrics:
        """Save a step; returns when it is on the disk."""
        start = time.perf_counter()
        self._activity.enter("save", f"step{progress.step}")
        size = self._saver.save(self._about(progress), self._assembly.optimizer.iter_state(), self._shapes())
        seconds = time.perf_counter() - start
        return self._metrics(progress.step, size, seconds, seconds)

    def _take(self, behind: AsyncSaver, *, wait: bool) -> list[CheckpointMetrics]:
        """The step that was saved behind the training, once that has ended on every rank: they notice together."""
        if not behind.busy:
            return []
        context = self._assembly.context
        if not wait:
            going_on = torch.tensor([0.0 if behind.ended else 1.0], device=context.device)
            if context.groups.max_(going_on, "world").item():
                return []
        step, size, seconds = behind.wait()
        return [self._metrics(step, size, self._stood_still, seconds)]

    def _metrics(self, step: int, size: int, seconds: float, write_seconds: float) -> CheckpointMetrics:
        return CheckpointMetrics(step, self._checkpoints.folder(step), size, seconds, write_seconds)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The logical tensors of which this rank holds a part, with their global shapes."""
        infos = [info for described in self._assembly.infos for info in described.values()]
        return {part.name: part.shape for info in infos for part in info.parts}

    def _about(self, progress: Progress) -> About:
        run, keys = self._run, identity(self._run)
        return About(
            step=progress.step,
            run=self._folder.run_id,
            time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            counters=progress.counters,
            losses=progress.losses,
            scaler=dict(self._assembly.scaler.state_dict()),
            data=self._data,
            plugins=plugin_records(run.plugins),
            versions={"megatron-run": __version__, "torch": torch.__version__, "python": platform.python_version()},
            topology={**asdict(run.sizes), "world": run.sizes.world, "chunks": run.config.parallel.chunks},
            config=digest(keys),
            identity=keys,
        )


def fingerprint(dataset: Dataset) -> DataRecord:
    """What tells ``dataset`` from others: how many samples it has, and the contents of some, the last among them."""
    count, total = len(dataset), hashlib.sha256()
    for index in sorted({(count - 1) * place // (_LOOKED_AT - 1) for place in range(_LOOKED_AT)} if count else ()):
        for name, values in sorted(dataset[index].items()):
            total.update(json.dumps([index, name, str(values.dtype), values.shape]).encode())
            total.update(values.tobytes())
    return DataRecord(samples=count, sha256=total.hexdigest())
