"""The training loop, the one place where all kinds of plugin meet. Read it top to bottom.

One step is ``_step``: ``_accumulate`` runs forwards and backwards in the schedule's order, then ``_update`` unscales,
checks and clips the gradients and applies the optimizer. ``runtime.gradients`` draws how gradients leave during the
backward.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import torch

from megatron_run.errors import ExitCode
from megatron_run.planning.batch_size import BatchSizes, run_length, total_samples
from megatron_run.planning.learning_rate import LearningRate, WeightDecay
from megatron_run_engine.evaluation.evaluator import Evaluator, generate_text, why_no_text
from megatron_run_engine.host.process import chosen_kernels
from megatron_run_engine.run_folder.restart_times import RestartTimes
from megatron_run_engine.runtime.execute import StepInputs
from megatron_run_engine.runtime.losses import Losses
from megatron_run_engine.runtime.world import World
from megatron_run_engine.training.build import Assembly, build
from megatron_run_engine.training.checked_plugins import open_split
from megatron_run_engine.training.health.faulting import install_faults
from megatron_run_engine.training.health.guards import Guards
from megatron_run_engine.training.health.launches import watch_launches
from megatron_run_engine.training.loader import BatchLoader
from megatron_run_engine.training.loss_weights import LossWeights
from megatron_run_engine.training.numbers import (
    MISMATCH,
    STOP,
    UNSAVED,
    HostNumbers,
    Progress,
    StepDone,
    StepFacts,
    StepNumbers,
    agreed_code,
    step_metrics,
)
from megatron_run_engine.training.observers import Beginning, Observers, start_observers
from megatron_run_engine.training.peak import device_peak
from megatron_run_engine.training.same_data import check_same_data
from megatron_run_engine.training.state.checkpointing import Checkpointing, fingerprint
from megatron_run_engine.training.state.resuming import Resumed
from megatron_run_engine.training.step_runner import CapturePolicy, StepRunner
from megatron_run_engine.training.tracing import start_tracing

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron_run.contracts import StepMetrics
    from megatron_run.contracts.activity import Activity
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.runtime.execute import StepRecord
    from megatron_run_engine.runtime.world import StopRequest


def train_rank(
    run: ResolvedRun, world: World, folder: RunFolder, stop: StopRequest, activity: Activity | None = None
) -> ExitCode:
    """Train ``run`` on this rank until the last step, or until ``stop`` is requested on any rank.

    Training starts at the first step or resumes from a checkpoint. ``activity`` records what the rank is doing.
    """
    with chosen_kernels(run.config.run.deterministic, world.device):
        times = RestartTimes(folder)
        times.mark("joined")
        assembly = build(run, world, activity)
        trainer = Trainer(run, assembly, folder, stop, times, world)
        times.mark("built")
        install_faults(run, assembly, folder.attempt)
        trainer.resume()
        times.mark("loaded")
        observers = start_observers(run, assembly, folder, trainer.beginning)
        try:
            code = trainer.train(observers)
        except BaseException as error:
            observers.on_error(error)
            trainer.close(error)
            raise
        observers.on_train_end("finished" if code is ExitCode.DONE else f"stopped by {stop.stopped_by(code)}")
        return code


class Trainer:
    """Runs steps: executor, optimizer and scaler in this order, then observers, guards, evaluation and saving."""

    def __init__(
        self,
        run: ResolvedRun,
        assembly: Assembly,
        folder: RunFolder,
        stop: StopRequest,
        times: RestartTimes | None = None,
        world: World | None = None,
    ) -> None:
        self._run, self._assembly, self._folder, self._stop, self._times = run, assembly, folder, stop, times
        train, self._context, self._activity = run.config.train, assembly.context, assembly.context.groups.activity
        self._batches = BatchSizes(train, run.sizes.data)
        self._go_on(Resumed(Progress()))
        self._eval_interval = run.config.eval.interval.steps(self._last, train.global_batch_size)
        self._flops = assembly.flops_per_token
        self._losses = Losses(assembly.model, self._context.metrics)
        self._weights = LossWeights(run, assembly)
        self._steps = StepRunner(assembly, self._weights.seed)
        self._launches = watch_launches(
            self._context, assembly.graph_capture, assembly.chunks, str(run.one("graph-capture"))
        )
        self._graphs: CapturePolicy | None = None
        # Both ride on the all-reduce of the metrics, so that agreeing to stop or to recapture costs no collective.
        self._stop_meter = self._context.metrics.scalar(STOP)
        self._unsaved = self._context.metrics.scalar(UNSAVED)
        self._mismatches = self._context.metrics.scalar(MISMATCH)
        length = self._context.pieces.part(train.sequence_length)
        self._boundary = partial(
            assembly.model.boundary, micro_batch_size=train.micro_batch_size, sequence_length=length
        )
        self._loader = BatchLoader(run, assembly)
        opened = partial(open_split, run.one("data"), assembly.data, most_ids=assembly.context.vocab_size)
        self._dataset = opened("train", train.sequence_length, train.seed, total_samples(train))
        held_out = run.config.eval.batches * train.global_batch_size
        validation = opened("validation", train.sequence_length, train.seed, held_out)
        self._evaluator = Evaluator(run, assembly.network, assembly.data, validation, opened)
        self._checkpoints = Checkpointing(run, assembly, folder, self._dataset)
        if run.sizes.world > 1:
            records = {"train": self._checkpoints.data, "validation": fingerprint(validation)}
            check_same_data(run.one("data"), records, self._context)
        self._guards = Guards(run, assembly, self._losses, self._last, folder, world or World())
        watched = self._context.topology.rank == 0  # the only rank with observers
        self.peak = device_peak(run.config.run, train.precision, self._context.device) if watched else None

    @property
    def validation_samples(self) -> list[int]:
        """Indices of the validation samples that every evaluation scores; none without a validation split."""
        return self._evaluator.samples

    @property
    def beginning(self) -> Beginning:
        """Where this attempt begins; call it after :meth:`resume`."""
        return Beginning(self._progress.step + 1, self._last, self._resumed, self.validation_samples, self.peak)

    def resume(self) -> None:
        """Load the checkpoint to resume from, if there is one."""
        self._go_on(self._checkpoints.resume())

    def _go_on(self, resumed: Resumed) -> None:
        """Go on from there: set the number of the last step (they count from 1), and the rates until then."""
        self._resumed, self._progress, train = resumed, resumed.progress, self._run.config.train
        # The steps so far may have had other batches: a run that goes on may change its batch.
        self._last, total = run_length(train, self._progress.step, self._progress.samples)
        self._learning_rate = LearningRate.from_config(train, total)
        self._weight_decay = WeightDecay.from_config(train, total)

    def close(self, reason: BaseException | None = None) -> None:
        """Wait for saves in the background, whatever the ``reason`` for which the training has ended."""
        self._checkpoints.close(reason)

    def train(self, observers: Observers) -> ExitCode:
        """Run steps until the last one, or until a rank is asked to stop. Evaluate and save when due and at the end.

        Called again, it goes on, with the graphs that it has.
        """
        graphs = self._graphs = self._graphs or CapturePolicy(
            self._run, self._assembly, self._batches, self._progress, self._mismatches, self._steps
        )
        tracing = start_tracing(self._run.plans, self._context, observers, self._last)
        while self._progress.step < self._last:
            graphs.prepare(self._progress, observers)
            clock = tracing.clock(self._progress.step + 1)
            metrics, times, stop, mismatch, unsaved = self._step(clock)
            metrics = self._with_restart(metrics)
            graphs.note_mismatch(mismatch=mismatch)
            self._activity.enter("observe")
            self._folder.heartbeat(metrics.step)
            observers.on_step_end(metrics)
            if clock is not None:
                tracing.report(metrics.step, metrics.microbatches, times, observers)
            if (rewound := self._guards.rewind(self._progress, self._checkpoints)) is not None:
                self._progress = rewound  # the step is undone: there is nothing to evaluate or save
                continue
            if stop is not None and unsaved:
                self._leave_unsaved()
                return stop
            if (back := self._check_evaluate_save(observers, stopping=stop is not None)) is not None:
                self._progress = back  # the steps since then are done again
                continue
            if stop is not None and metrics.step < self._last:
                return stop
        written = self._run, self._assembly.network, self._assembly.data
        text = generate_text(*written) if self._run.config.eval.sample else None
        if text is not None:
            observers.on_sample(text)
        elif self._run.config.eval.sample:
            self._context.log.warning("%s", why_no_text(*written))
        self._activity.enter("end")
        return ExitCode.DONE

    def _with_restart(self, metrics: StepMetrics) -> StepMetrics:
        """``metrics``, those of an attempt's first step with the phases of the restart, if it is one."""
        times, self._times = self._times, None
        if times is None:
            return metrics
        times.finish()
        if not times.taken:
            return metrics
        self._context.log.warning("%s", times)
        return replace(metrics, extra={**metrics.extra, **{f"restart/{name}": s for name, s in times.taken.items()}})

    def _check_evaluate_save(self, observers: Observers, *, stopping: bool) -> Progress | None:
        """Run the guards after a step that was kept, then evaluate and save if that is due.

        Where the process must have ended soon, the save comes first. Returns where the guards have gone back to, if so.
        """
        step, last = self._progress.step, self._last
        saving = stopping or self._checkpoints.is_due(step, last)
        back = self._guards.check(self._progress, saving=saving, checkpoints=None if stopping else self._checkpoints)
        if back is not None:
            return back
        hurried = stopping and self._run.config.run.stop_within is not None
        if hurried:
            self._save(observers, saving=True, stopping=True)
        if step == last or (self._eval_interval and step % self._eval_interval == 0):
            held_out = (self._evaluator.evaluate(step),) if self.validation_samples else ()
            for metrics in (*held_out, *self._evaluator.tasks(step)):
                observers.on_eval_end(metrics)
        if not hurried:
            self._save(observers, saving=saving, stopping=stopping)
        return None

    def _save(self, observers: Observers, *, saving: bool, stopping: bool) -> None:
        """Save the step if that is due, and note how long it takes."""
        if saving:
            # With overlap_param_gather, all-gathers may be in flight. None may be when the run ends, as it may here.
            self._assembly.optimizer.finish_param_sync()
        for saved in self._checkpoints.after_step(self._progress, self._last, stopping=stopping):
            self._stop.save_seconds = saved.write_seconds
            observers.on_checkpoint(saved)

    def _leave_unsaved(self) -> None:
        """End after a step for whose save on disk no time is left. In memory, where it is kept, it takes less.

        A save in the background goes on as long as there is time.
        """
        self._guards.check(self._progress, saving=self._checkpoints.keeps_in_memory)
        self._assembly.optimizer.finish_param_sync()
        step, took, left = self._progress.step, self._stop.save_seconds, self._stop.left
        where = "in memory alone" if self._checkpoints.keep_in_memory(self._progress) else "not saved"
        rest = "too little on another rank" if left == inf else f"{max(0.0, left):.1f} s"
        text = "step %d is done and %s: the last save took %.1f s, and of run.stop_within there was left %s"
        self._context.log.warning(text, step, where, took, rest)
        self.close()

    def _step(self, clock: Callable[[], float] | None) -> StepDone:
        """Run one step. ``clock``, if given, times its actions."""
        start, progress = time.perf_counter(), self._progress
        self._stop.begin_step(progress.step + 1)
        self._activity.step(progress.step + 1)
        self._activity.enter("data")
        batch = self._batches.at(progress.samples)
        microbatches = self._batches.microbatches(batch)
        lr, weight_decay = self._learning_rate.at(progress.scheduled), self._weight_decay.at(progress.scheduled)
        times = self._accumulate(microbatches, clock).times
        numbers = self._update(lr, weight_decay, batch)
        self._assembly.scaler.check_state(numbers.loss_scale)
        progress.count(batch, skipped=numbers.skipped)
        facts = StepFacts(batch, microbatches, lr, time.perf_counter() - start, self._flops, self.peak)
        metrics = step_metrics(self._run, progress, facts, numbers, self._context.device)
        self._stop.end_step()
        means = numbers.means
        return StepDone(metrics, times, agreed_code(means), mismatch=MISMATCH in means, unsaved=UNSAVED in means)

    def _accumulate(self, microbatches: int, clock: Callable[[], float] | None) -> StepRecord:
        """Run forward and backward of every microbatch in the schedule's order. Gradients end in ``main_grad``."""
        optimizer, step = self._assembly.optimizer, self._progress.step + 1
        optimizer.zero_grad()
        self._context.gradients.start_step(microbatches, optimizer.grad_ready)
        self._losses.start_step()
        load = self._guards.watched(step, self._loader.training(self._dataset, step, self._progress.position))
        inputs = StepInputs(
            microbatch=self._weights.start_step(microbatches, load),
            boundary=self._boundary,
            report=self._losses.report,
            seed=partial(self._weights.seed, microbatches),
            start_grad_sync=optimizer.start_grad_sync,
        )
        with self._launches.launching(timed=clock is not None):
            record = self._steps.run(self._assembly.programs.training(microbatches), inputs, clock)
        self._activity.enter("gradient-reduce")
        optimizer.finish_grad_sync()
        return record

    def _update(self, lr: float, weight_decay: float, batch: int) -> HostNumbers:
        """Unscale, check, clip and apply the update. A step whose loss or gradient is unusable changes no weight.

        The host waits for the device once in a step: here, before the update, since all numbers of the step are known
        by then. While a GPU updates, the host reports this step and launches the next one.
        """
        optimizer, scaler, context = self._assembly.optimizer, self._assembly.scaler, self._context
        self._activity.enter("optimizer")
        if (code := self._stop.read()) is not None:
            self._stop_meter.add(float(code))
            if not self._stop.save_fits:
                self._unsaved.add(1.0)
        sums = context.metrics.collect(context.groups)  # all-reduced: every rank decides from the same numbers
        scale = scaler.scale.clone()  # the scale of this step: update() below changes it in place
        found_inf = optimizer.unscale_(scaler.inv_scale)
        scaler.update(found_inf)
        norm = optimizer.clip_(self._run.config.train.clip_norm)
        zeros = optimizer.count_zeros() if self._run.config.train.count_zeros else torch.full_like(norm, torch.nan)
        self._load_ahead(batch)
        numbers = StepNumbers(sums, found_inf, norm, zeros, scale).to_host(context.metrics)
        self._launches.synchronised()
        skipped = self._guards.skips(self._progress, numbers)
        # Before the optimizer gathers parameters, which would overwrite what the model changes.
        self._assembly.model.before_update(skipped=skipped)
        if skipped:
            return numbers.without_update()
        optimizer.step(lr, weight_decay)
        self._activity.enter("parameter-gather")
        optimizer.start_param_sync()
        return numbers

    def _load_ahead(self, batch: int) -> None:
        """Load what the step after this one, of ``batch`` samples, begins with, while the device works on this one."""
        progress = self._progress
        if progress.step + 1 < self._last:
            with self._activity.within("data", "of the next step"):
                following = self._batches.microbatches(self._batches.at(progress.samples + batch))
                self._loader.load_ahead(self._dataset, progress.position + batch, following)
