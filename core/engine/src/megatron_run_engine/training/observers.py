"""Calls the observers of a run. An observer that fails never stops the training."""

from __future__ import annotations

from collections import Counter
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch

from megatron_run.contracts import RunSummary
from megatron_run.contracts.topology import Replicas
from megatron_run.pipeline.simulate import timeline
from megatron_run.planning.describe import describe
from megatron_run.planning.run import to_yaml
from megatron_run_engine.host.process import processor_name
from megatron_run_engine.runtime.parameter_init import count_parameters

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable, Sequence

    from megatron_run.contracts import (
        CaptureMetrics,
        CheckpointMetrics,
        DevicePeak,
        EvalMetrics,
        Observer,
        StepMetrics,
        StepTrace,
    )
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.training.build import Assembly
    from megatron_run_engine.training.state.resuming import Resumed


#: Failures after which an observer is disabled.
PATIENCE = 3


class Observers:
    """All observers behind the methods of one :class:`megatron_run.contracts.Observer`.

    An observer that raises is logged with its error, and disabled after ``PATIENCE`` failures. Training and the other
    observers continue.
    """

    def __init__(self, observers: Iterable[tuple[str, Observer]], log: logging.Logger) -> None:
        self._observers = list(observers)
        self._traced: dict[int, frozenset[int]] = {}  # by id(): an observer need not be hashable
        self._failures: Counter[str] = Counter()
        self._log = log

    def on_train_start(self, run: RunSummary) -> None:
        """Training is about to start."""
        self._each("on_train_start", lambda observer: observer.on_train_start(run))

    def traced_steps(self) -> frozenset[int]:
        """Return the steps that any observer wants to be traced."""
        self._each("traced_steps", self._ask_for_steps)
        return frozenset().union(*self._traced.values())

    def _ask_for_steps(self, observer: Observer) -> None:
        self._traced[id(observer)] = frozenset(index(step) for step in observer.traced_steps())

    def on_step_end(self, metrics: StepMetrics) -> None:
        """A step has ended. A skipped one is also reported to ``on_skip``."""
        self._each("on_step_end", lambda observer: observer.on_step_end(metrics))
        if metrics.skipped:
            self._each("on_skip", lambda observer: observer.on_skip(metrics))

    def on_trace(self, trace: StepTrace) -> None:
        """A step was traced. Only the observers that asked for it are called."""

        def call(observer: Observer) -> None:
            if trace.step in self._traced.get(id(observer), ()):
                observer.on_trace(trace)

        self._each("on_trace", call)

    def on_capture(self, metrics: CaptureMetrics) -> None:
        """Segments were captured."""
        self._each("on_capture", lambda observer: observer.on_capture(metrics))

    def on_eval_end(self, metrics: EvalMetrics) -> None:
        """An evaluation has ended."""
        self._each("on_eval_end", lambda observer: observer.on_eval_end(metrics))

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """A step was saved."""
        self._each("on_checkpoint", lambda observer: observer.on_checkpoint(metrics))

    def on_sample(self, text: str) -> None:
        """The model wrote ``text``."""
        self._each("on_sample", lambda observer: observer.on_sample(text))

    def on_error(self, error: BaseException) -> None:
        """The run is about to end with ``error``."""
        self._each("on_error", lambda observer: observer.on_error(error))

    def on_train_end(self, reason: str) -> None:
        """Training ended."""
        self._each("on_train_end", lambda observer: observer.on_train_end(reason))

    def _each(self, event: str, call: Callable[[Observer], None]) -> None:
        for name, observer in list(self._observers):
            try:
                call(observer)
            except (Exception, SystemExit) as cause:  # observers are third-party code: nothing of theirs ends a run
                self._failed(name, event, cause)

    def _failed(self, name: str, event: str, cause: Exception | SystemExit) -> None:
        self._failures[name] += 1
        count = self._failures[name]
        what = f"observer {name} failed in {event}: {type(cause).__name__}: {cause}"
        self._log.warning("%s (%d of %d)", what, count, PATIENCE)
        self._log.debug("observer %s", name, exc_info=cause)
        if count == PATIENCE:
            self._log.warning("observer %s is disabled after %d failures; training continues", name, PATIENCE)
            self._observers = [pair for pair in self._observers if pair[0] != name]


class Beginning(NamedTuple):
    """Where an attempt begins: its first and last step, what it resumed, what it evaluates, rank 0's peak.

    ``validation`` holds the indices of the evaluated samples.
    """

    first_step: int
    last_step: int
    resumed: Resumed
    validation: Sequence[int]
    peak: DevicePeak | None


def start_observers(run: ResolvedRun, assembly: Assembly, folder: RunFolder, beginning: Beginning) -> Observers:
    """Create the observers on rank 0 and report the start to them. Collective. The other ranks get none."""
    parameters = model_parameters(assembly)  # collective: before the other ranks return
    if assembly.context.topology.rank:
        return Observers([], assembly.context.log)
    record = device_record(assembly.context.device, run.config.train.precision, beginning.peak)
    folder.write_record("device.json", record)
    folder.show_record("device.json")
    made: list[tuple[str, Observer]] = [(plugin.name, plugin.create()) for plugin in run.plugins["observer"]]
    observers = Observers(made, assembly.context.log)
    observers.on_train_start(summarise(run, assembly, folder, parameters, beginning))
    return observers


def device_record(device: torch.device, precision: str, peak: DevicePeak | None) -> dict[str, Any]:
    """The contents of ``device.json``: rank 0's device, and the peak that its mfu is relative to."""
    return {
        "v": 1,
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "precision": precision,
        "peak_tflops": peak and peak.tflops,
        "peak_source": peak and peak.source,
    }


def model_parameters(assembly: Assembly) -> int:
    """Return the number of parameters of the whole model, each counted once. Collective over the world."""
    topology = assembly.context.topology
    firsts = {axis: topology.peers(axis)[0] for axis in get_args(Replicas)}  # the first rank of each replica group
    infos = (info for each in assembly.infos for info in each.values() if firsts[info.replicas] == topology.rank)
    count = torch.tensor([0 if topology.tensor_rank else count_parameters(infos)], device=assembly.context.device)
    return int(assembly.context.groups.sum_(count, "world").item())


def summarise(
    run: ResolvedRun, assembly: Assembly, folder: RunFolder, parameters: int, beginning: Beginning
) -> RunSummary:
    """Return the summary of the run that observers receive at its start."""
    train, resumed = run.config.train, beginning.resumed
    return RunSummary(
        folder=folder.path,
        attempt=folder.attempt,
        first_step=beginning.first_step,
        steps=beginning.last_step,
        parameters=parameters,
        world_size=run.sizes.world,
        config=to_yaml(run),
        plan=describe(run),
        timeline=timeline(run.plans[max(run.plans)]),
        baselines=assembly.data.baselines(train.sequence_length, train.seed, beginning.validation),
        peak=beginning.peak,
        run_id=folder.run_id,
        resumed=resumed.folder,
        changes={change.key: (change.before, change.now) for change in resumed.changes},
        data=assembly.data.summary(train.sequence_length, train.seed),
    )
