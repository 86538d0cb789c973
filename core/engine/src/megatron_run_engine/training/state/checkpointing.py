"""The checkpoints of a run on one of its ranks: when a step is saved, what it contains, and resuming from it."""

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
from megatron_run.errors import GuardError, RankLostError, RunError
from megatron_run.planning.batch_size import run_length
from megatron_run_engine.checkpoint.adapted import record_of
from megatron_run_engine.checkpoint.async_saver import AsyncSaver, Staging
from megatron_run_engine.checkpoint.collectives import WorldRanks
from megatron_run_engine.checkpoint.manifest import About, AdaptersRecord, DataRecord
from megatron_run_engine.checkpoint.memory_home import forget_steps
from megatron_run_engine.checkpoint.saving import Retention, Saver
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.data.contents import contents_hash
from megatron_run_engine.run_folder.changes import digest, identity
from megatron_run_engine.run_folder.folder import is_run_id
from megatron_run_engine.run_folder.permissions import with_granted
from megatron_run_engine.runtime.comm import create_aside, patience
from megatron_run_engine.runtime.parameter_init import frozen, shapes_of, trained
from megatron_run_engine.training.numbers import Progress
from megatron_run_engine.training.state.data_files import keep_listed
from megatron_run_engine.training.state.init_from import branch, start_from
from megatron_run_engine.training.state.keeping import Keeping
from megatron_run_engine.training.state.memory_tier import MemoryTier
from megatron_run_engine.training.state.programs import programs
from megatron_run_engine.training.state.resuming import Resumed, choose_on_rank0, files_at_once, plugin_records, resume

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron_run.contracts import Dataset
    from megatron_run.contracts.quantities import Span
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.training.build import Assembly

#: Samples, spread over the dataset, whose contents go into its fingerprint.
_FINGERPRINT_SAMPLES = 8


class Checkpointing:
    """Saves and loads the steps of one run on one of its ranks.

    ``dataset`` is the training split, and ``data`` its fingerprint.
    """

    def __init__(self, run: ResolvedRun, assembly: Assembly, folder: RunFolder, dataset: Dataset) -> None:
        self._run, self._assembly, self._folder = run, assembly, folder
        files, context = assembly.data.files, assembly.context
        hashes = contents_hash(files, alive=context.groups.activity.heartbeat, tell=context.log.warning)
        self.data = fingerprint(dataset)
        if hashes is not None:
            listed = tuple(zip(map(str, files), hashes.each, strict=True))
            self.data = self.data.model_copy(update={"files": hashes.total, "listed": listed})
        self._programs = programs(run)  # as they are imported: they may be edited while the run goes on
        self._keeping = Keeping(run, folder, assembly.data)
        context, topology = assembly.context, assembly.context.topology
        self._ranks = WorldRanks(context.groups, topology.rank, topology.sizes.world, context.device)
        self._checkpoints, self._activity = Checkpoints(folder.checkpoints), context.groups.activity
        self._told_of_removal = False
        threads = files_at_once()
        self._saver = Saver(
            self._checkpoints,
            self._ranks,
            folder.run_id,
            self._retention(),
            activity=self._activity,
            files_of_rank=threads,
            at_once=threads,
        )
        self._async_saver = self._make_async_saver() if run.config.checkpoint.async_save else None
        # Of a run without a name, in a scratch folder, no other process knows: nobody would resume it.
        in_memory = run.config.checkpoint.memory_interval.amount and is_run_id(folder.run_id)
        self._memory = MemoryTier(run, assembly, folder) if in_memory else None
        self._blocked_s = 0.0  # how long the asynchronous save in progress has blocked the training
        self._unreported: list[CheckpointMetrics] = []
        self._adapters: AdaptersRecord | None = None  # what a step adds to which weights; None: it holds all of them

    def _make_async_saver(self) -> AsyncSaver:
        run, context = self._run, self._assembly.context
        rank, size = context.topology.rank, context.topology.sizes.world
        activity = self._activity.in_background()
        # A process group of its own: the saver's thread issues collectives concurrently with the training, and on one
        # group the ranks would pair them up in different orders.
        aside = create_aside(size, timedelta(seconds=patience(run.config.run.timeout)), activity)
        ranks = WorldRanks(aside, rank, size, torch.device("cpu"))
        saver = Saver(  # writes one file at a time: the cores belong to the training
            self._checkpoints,
            ranks,
            self._folder.run_id,
            self._retention(),
            activity=activity,
            files_of_rank=files_at_once(),
        )
        return AsyncSaver(saver, Staging(context.device), activity, self._activity)

    def _retention(self) -> Retention:
        config = self._run.config
        last, _ = run_length(config.train, 0, 0)
        every = config.checkpoint.keep_every.steps(last, config.train.global_batch_size)
        return Retention(config.checkpoint.keep, every, self._tell_of_removal)

    def _tell_of_removal(self, steps: Sequence[int]) -> None:
        """Log the first removal of this attempt. Called on rank 0, also by the thread of an asynchronous save."""
        if not self._told_of_removal:
            self._told_of_removal = True
            which = ", ".join(map(str, steps))
            keep = self._run.config.checkpoint.keep
            text = "step %s is removed, and so on: checkpoint.keep=%d newest stay, checkpoint.keep_every=N keeps others"
            self._assembly.context.log.warning(text, which, keep)

    def resume(self) -> Resumed:
        """Load the step that ``--resume`` selects. Collective.

        If it selects none, the state of ``run.branch_from`` or the weights of ``run.init_from`` are loaded, if set.
        Raises :class:`megatron_run.errors.CheckpointError` before any state changes, but for an error of reading values
        or of setting newer steps aside.
        """
        run, config = self._run, self._run.config.run
        with self._activity.within("load"):
            resumed = self._load(run.request.resume, self._memory)
            own, base, adapters = resumed.progress.step or None, None, self._assembly.adapters
            if own is None and config.branch_from is not None:
                resumed = branch(run, self._assembly, config.branch_from, self._ranks, self.data)
            elif own is None and config.init_from is not None:
                shapes = shapes_of(frozen(each) if self._assembly.adapters else each for each in self._assembly.infos)
                base = start_from(run, self._assembly, config.init_from, self._ranks, shapes)
        if adapters is not None:
            self._adapters = resumed.adapters or record_of(adapters, base)
            if not self._adapters.base and self._ranks.rank == 0:
                self._assembly.context.log.warning("%s adapts random weights: set run.init_from", adapters.name)
        contents = [change for change in resumed.changes if change.by_content]
        # Nothing in the folder has changed so far: everything above may refuse.
        self._folder.begin(resumed.progress.step, contents)
        self._keeping.begin(base or resumed.folder, None if own is None else self._folder.path)
        keep_listed(self.data, self._folder)
        self._saver.set_aside(own, self._folder.attempt)
        if self._memory is not None:
            self._memory.begin(own)
        elif is_run_id(self._folder.run_id):
            forget_steps(run.config.checkpoint, self._folder.run_id, self._folder.path, own)
        return resumed

    def reload_newest(self, *, from_memory: bool = False) -> Progress | None:
        """Load the newest checkpoint of this run and return its progress; None if there is none. Collective.

        That is one on disk, or ``from_memory`` one that is as new there; None too for a run without steps in memory.

        Raises :class:`megatron_run.errors.CheckpointError` as :meth:`after_step` does.
        """
        if self._async_saver is not None:  # the save in progress will be the newest
            self._unreported += self._collect(self._async_saver, wait=True)
        if from_memory:
            if self._memory is None:
                return None
            self._memory.wait()
        progress = self._load("auto", self._memory if from_memory else None).progress
        if progress.step and self._memory is not None:
            self._memory.forget(progress.step)
        return progress if progress.step else None

    def _load(self, choice: str, memory: MemoryTier | None = None) -> Resumed:
        """Load the step of ``choice`` from the disk, or the newest one from ``memory``, if it is as new."""
        run, checkpoints, ranks = self._run, self._checkpoints, self._ranks
        with self._activity.within("load"):
            step, manifest = choose_on_rank0(choice, checkpoints, ranks), None
            if memory is not None and choice == "auto" and (found := memory.find(step)) is not None:
                checkpoints, step, manifest = found
            elif memory is not None and choice != "auto" and step is not None:
                memory.check_on_disk(step, checkpoints)
            if step is None:
                return Resumed(Progress())
            run, keys = with_granted(run, self._folder.path, step), self._folder.changed_keys
            return resume(run, self._assembly, checkpoints, ranks, self.data, step, keys, manifest)

    def is_due(self, step: int, last: int) -> bool:
        """Whether ``step`` of ``last`` steps is saved on disk or in memory."""
        return self._on_disk(step, last) or self._in_memory(step, last)

    def _on_disk(self, step: int, last: int) -> bool:
        return step == last or self._divides(self._run.config.checkpoint.interval, step, last)

    def _in_memory(self, step: int, last: int) -> bool:
        return self._memory is not None and self._divides(self._run.config.checkpoint.memory_interval, step, last)

    def _divides(self, interval: Span, step: int, last: int) -> bool:
        steps = interval.steps(last, self._run.config.train.global_batch_size)
        return bool(steps and step % steps == 0)

    def after_step(self, progress: Progress, last: int, *, stopping: bool) -> list[CheckpointMetrics]:
        """Save the step that ``progress`` counted last if it is due, if it is the ``last``, or if the run is stopping.

        Collective; call it after every step. Returns the steps committed since the last call. An asynchronous save is
        returned by a later call. Raises :class:`megatron_run.errors.CheckpointError` on every rank if a save failed.
        """
        due, final = self._on_disk(progress.step, last), stopping or progress.step == last
        if self._memory is None:
            return self._after_step(progress, due=due, final=final)
        if final:
            self._memory.wait()
        elif self._in_memory(progress.step, last):
            self._begin_in_memory(self._memory, progress)
        saved = self._after_step(progress, due=due, final=final)
        if final:  # every rank has come to the commit on disk, and saves no more in memory
            self._memory.remove()
        return saved

    @property
    def keeps_in_memory(self) -> bool:
        """Whether steps are saved in memory too."""
        return self._memory is not None

    def keep_in_memory(self, progress: Progress) -> bool:
        """Save a step in memory for which the disk takes too long; whether it is there. Collective."""
        if self._memory is None:
            return False
        self._begin_in_memory(self._memory, progress)
        return self._memory.wait()

    def _begin_in_memory(self, memory: MemoryTier, progress: Progress) -> None:
        self._activity.enter("save", f"step{progress.step} in memory")
        memory.save(self._about(progress), self._assembly.optimizer.iter_state(), self._shapes())

    def _after_step(self, progress: Progress, *, due: bool, final: bool) -> list[CheckpointMetrics]:
        """:meth:`after_step` on disk."""
        if self._async_saver is None:
            return [self._save(progress)] if due or final else []
        unreported, self._unreported = self._unreported, []
        start = time.perf_counter()
        if due or final:
            self._activity.enter("save", f"step{progress.step}")
        saved = [*unreported, *self._collect(self._async_saver, wait=due or final)]
        if final:  # the process is about to end: save synchronously
            return [*saved, self._save(progress)]
        if due:
            self._async_saver.start(self._about(progress), self._assembly.optimizer.iter_state(), self._shapes())
            self._blocked_s = time.perf_counter() - start
        return saved

    def close(self, reason: BaseException | None = None) -> None:
        """Wait for saves in the background. Log failures instead of raising them: the run ends for another ``reason``.

        A guard has judged wrong what lies in memory; the next attempt must not find it there.
        """
        # After what only a lost rank explains no step in memory will be whole, and a wait would keep the next attempt.
        known = isinstance(reason, RunError | KeyboardInterrupt) and not isinstance(reason, RankLostError)
        alike = reason is None or known or self._ranks.size == 1
        if self._memory is not None and alike:
            self._finish(self._memory.wait)
            if isinstance(reason, GuardError):
                self._memory.remove()
        if self._async_saver is not None and self._async_saver.busy:
            saver, log = self._async_saver, self._assembly.context.log
            self._finish(lambda: log.info("step %d is saved", saver.wait().step))

    def _finish(self, save: Callable[[], object]) -> None:
        """Do what ends a ``save``; whatever it raises is logged."""
        log = self._assembly.context.log
        try:
            save()
        except RunError as error:
            log.warning("%s", error)
        except Exception as error:  # a bug, or the failed collective of a lost rank
            what = "a step could not be saved asynchronously"
            log.warning("%s: %s: %s", what, type(error).__name__, error, exc_info=True)

    def _save(self, progress: Progress) -> CheckpointMetrics:
        """Save a step synchronously: return when it is committed."""
        start = time.perf_counter()
        self._activity.enter("save", f"step{progress.step}")
        size = self._saver.save(self._about(progress), self._assembly.optimizer.iter_state(), self._shapes())
        seconds = time.perf_counter() - start
        return self._metrics(progress.step, size, seconds, seconds)

    def _collect(self, saver: AsyncSaver, *, wait: bool) -> list[CheckpointMetrics]:
        """Return the asynchronously saved step, if the save has ended on every rank or ``wait`` is set. Collective."""
        if not saver.busy:
            return []
        context = self._assembly.context
        if not wait:
            # The threads end at different times. All ranks must take the result, or raise the error, at the same step.
            running = torch.tensor([0.0 if saver.ended else 1.0], device=context.device)
            if context.groups.max_(running, "world").item():
                return []
        step, size, seconds = saver.wait()
        return [self._metrics(step, size, self._blocked_s, seconds)]

    def _metrics(self, step: int, size: int, seconds: float, write_seconds: float) -> CheckpointMetrics:
        return CheckpointMetrics(step, self._checkpoints.folder(step), size, seconds, write_seconds)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the global shapes of the logical tensors that are saved and of which this rank holds a part."""
        return shapes_of(map(trained, self._assembly.infos))

    def _about(self, progress: Progress) -> About:
        run, keys = self._run, identity(self._run)
        return About(
            step=progress.step,
            run=self._folder.run_id,
            time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            counters=progress.counters,
            losses=progress.losses,
            scaler=dict(self._assembly.scaler.state_dict()),
            data=self.data,
            plugins=plugin_records(run.plugins),
            versions={"megatron-run": __version__, "torch": torch.__version__, "python": platform.python_version()},
            topology={**asdict(run.sizes), "world": run.sizes.world, "chunks": run.config.parallel.chunks},
            config=digest(keys),
            identity=keys,
            tokenizer=self._keeping.record,
            adapters=self._adapters,
            positions=self._keeping.positions,
            programs=self._programs,
        )


def fingerprint(dataset: Dataset) -> DataRecord:
    """Return the fingerprint of ``dataset``: its number of samples, and a hash over some, first and last included."""
    count, total = len(dataset), hashlib.sha256()
    for index in sorted(
        {(count - 1) * place // (_FINGERPRINT_SAMPLES - 1) for place in range(_FINGERPRINT_SAMPLES)} if count else ()
    ):
        for name, values in sorted(dataset[index].items()):
            total.update(json.dumps([index, name, str(values.dtype), values.shape]).encode())
            total.update(values.tobytes())
    return DataRecord(samples=count, sha256=total.hexdigest())
