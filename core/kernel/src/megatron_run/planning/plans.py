"""Asks the schedule for layout and action lists of every step of the run, and verifies each answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from megatron_run.contracts import Schedule
from megatron_run.contracts.model import MAX_LAYERS
from megatron_run.contracts.schedule import LayoutSpec, Place, ScheduleSpec, check_counts
from megatron_run.contracts.schema import ParallelSection, TrainSection
from megatron_run.errors import Findings, InputError, PluginError, RunError, ScheduleError
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import check_layout, check_same_places, verify
from megatron_run.planning.batch_size import BatchSizes, total_samples, total_steps
from megatron_run.planning.layer_split import is_uneven, layer_counts
from megatron_run.planning.learning_rate import LearningRate, WeightDecay
from megatron_run.registry.hooks import in_one_line
from megatron_run.registry.loaded_plugin import Plugin

Answer = TypeVar("Answer")

#: The most microbatches of a step: lists of more take minutes and gigabytes, and are typing mistakes.
MAX_MICROBATCHES = 100_000
#: The most actions of a step: a forward and a backward for each stage, chunk and microbatch. They take half a minute.
MAX_ACTIONS = 2_000_000
#: The most places of layers: as many stages of one action each take seconds, and are no cluster's.
MAX_PLACES = 10_000


def microbatch_counts(train: TrainSection, data_parallel: int, follows_from: str = "") -> tuple[int, ...]:
    """Every number of microbatches that occurs in the run.

    ``follows_from`` is that of :class:`BatchSizes`. Raises :class:`~megatron_run.errors.RunError` when a global batch
    does not divide, or makes too many.
    """
    largest = train.global_batch_size // (train.micro_batch_size * data_parallel)
    if largest > MAX_MICROBATCHES:
        raise InputError(
            f"train.global_batch_size={train.global_batch_size} makes {largest} microbatches a step",
            why=f"every action of a step is planned, for at most {MAX_MICROBATCHES} microbatches",
            fix="lower it, or raise train.micro_batch_size or parallel.data",
        )
    counts = BatchSizes(train, data_parallel, follows_from).all_microbatches()
    if sum(counts) > 10 * MAX_MICROBATCHES:
        raise InputError(
            f"train.ramp_up has {len(counts)} sizes of the batch",
            why=f"each is planned, with {sum(counts)} microbatches together",
            fix="raise train.ramp_up.increment",
        )
    return tuple(sorted(counts))


def check_rates(train: TrainSection) -> None:
    """Raise :class:`~megatron_run.errors.Problems` where learning rate or weight decay cannot be followed.

    A ramp-up that leads nowhere, or a run without a step, is left to :func:`microbatch_counts`.
    """
    try:
        total_samples(train)
        total_steps(train)
    except InputError:
        return
    findings = Findings()
    for rate in (LearningRate, WeightDecay):
        with findings.collect():
            rate.from_config(train)
    findings.settle()


def plan_run(
    schedule: Plugin, layers: int, parallel: ParallelSection, counts: tuple[int, ...]
) -> tuple[tuple[Place, ...], dict[int, Plan]]:
    """Where each of ``layers`` layers lives, and the verified plan of a step for each of ``counts`` microbatches.

    Raises :class:`~megatron_run.errors.InputError` when the layers do not divide or the schedule refuses the shape: the
    user changes either. An answer that is no legal layout or plan is a :class:`~megatron_run.errors.ScheduleError`, any
    other failure of the schedule a :class:`~megatron_run.errors.PluginError`.
    """
    if max(counts, default=0) > MAX_MICROBATCHES:
        raise InputError(f"{max(counts)} microbatches are more than the {MAX_MICROBATCHES} that can be planned")
    stages, chunks = parallel.pipeline, parallel.chunks
    if stages * chunks > MAX_PLACES:
        raise InputError(
            f"parallel.pipeline={stages} x parallel.chunks={chunks} are {stages * chunks} places of layers",
            why=f"the actions of each are planned, and at most {MAX_PLACES}",
            fix="lower them",
        )
    actions = 2 * stages * chunks * max(counts, default=0)
    if actions > MAX_ACTIONS:
        raise InputError(
            f"{stages} stages x {chunks} chunks x {max(counts)} microbatches make {actions} actions a step",
            why=f"every action of a step is planned, and at most {MAX_ACTIONS}",
            fix="lower parallel.pipeline or train.global_batch_size, or raise train.micro_batch_size",
        )
    made: Schedule = schedule.create()
    layout = _place_layers(schedule, made, layers, parallel)
    plans = {}
    for count in counts:
        spec = ScheduleSpec(layout, stages, chunks, count)
        lists = _ask(schedule, "actions", partial(made.actions, spec))
        plans[count] = _prove(schedule, "actions", partial(verify, spec, lists))
    return layout, plans


def _place_layers(schedule: Plugin, made: Schedule, layers: int, parallel: ParallelSection) -> tuple[Place, ...]:
    """Where each of ``layers`` layers lives. For counts by stage, a layout of one layer per place tells the stages."""

    def ask(spec: LayoutSpec) -> tuple[Place, ...]:
        check_counts(spec)
        layout = tuple(_ask(schedule, "layout", partial(made.layout, spec)))
        _prove(schedule, "layout", partial(check_layout, spec, layout))
        return layout

    spec = LayoutSpec(parallel.pipeline, parallel.chunks, layers, parallel.layers)
    if not is_uneven(parallel):
        return ask(spec)
    probe = ask(replace(spec, layers=spec.stages * spec.chunks, counts=()))
    layout = ask(replace(spec, counts=layer_counts(layers, parallel, [place.stage for place in probe])))
    _prove(schedule, "layout", partial(check_same_places, probe, layout))
    return layout


def layers_of(model: Plugin) -> int:
    """The layers of a model by its options.

    Raises :class:`~megatron_run.errors.PluginError` when these are no :class:`~megatron_run.contracts.ModelOptions`.
    """
    layers = getattr(model.options, "num_layers", None)
    if layers is None and not model.loaded:
        raise InputError("model.num_layers is not set", why=f"{model} needs it", fix="add --set model.num_layers=...")
    breaks = f"plugin {model} of {model.source} breaks its contract"
    if not isinstance(layers, int):
        raise PluginError(breaks, why="its options have no num_layers, a whole number")
    if layers > MAX_LAYERS:
        raise InputError(f"model.num_layers={layers} is more than the {MAX_LAYERS} layers that can be planned")
    if model.loaded and not hasattr(model.options, "vocab_size"):
        raise PluginError(breaks, why="its options have no vocab_size, a whole number or None")
    return layers


#: What each method of a schedule returns.
_RETURNS = {"layout": "places in model order", "actions": "actions for each stage"}

#: What the author of an illegal answer should do.
_CORRECT = {
    "layout": "correct its layout, or choose another",
    "actions": "correct its actions (F3.1 is the forward of microbatch 3 in chunk 1), or choose another",
}


def _prove(schedule: Plugin, method: str, proof: Callable[[], Answer]) -> Answer:
    """Run ``proof`` on a schedule's answer; an error names the schedule and the fix."""
    try:
        return proof()
    except ScheduleError as fault:
        raise ScheduleError(
            f"{schedule} of {schedule.source} gives no legal plan: {fault.what}",
            why=fault.why,
            origin=fault.origin or schedule.origin,
            fix=fault.fix or _CORRECT[method],
        ) from fault
    except RunError:
        raise
    except (Exception, SystemExit) as cause:  # an answer of other things than places and actions
        why = f"it did not return a sequence of {_RETURNS[method]} ({type(cause).__name__}: {cause})"
        raise schedule.failed(method, why) from cause


def _ask(plugin: Plugin, method: str, question: Callable[[], Answer]) -> Answer:
    """Ask the schedule. A ScheduleError refuses the user's shape; any other exception is a failure of the plugin."""
    try:
        answer = question()
    except ScheduleError as refusal:
        raise InputError(refusal.what, why=refusal.why, origin=refusal.origin, fix=refusal.fix) from refusal
    except RunError:
        raise
    except (Exception, SystemExit) as cause:
        raise plugin.failed(method, in_one_line(cause, where=True)) from cause
    if not isinstance(answer, Sequence):
        raise plugin.failed(method, f"it returned {answer!r}, and must return a sequence: is its return missing?")
    return answer
