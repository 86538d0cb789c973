"""This rank's part of a model at rest, for any topology: built without an optimizer, filled with its weights."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from megatron_run.config.request import Found, Request
from megatron_run.contracts import DataSource, PluginInfo, Schedule
from megatron_run.contracts.activity import Activity
from megatron_run.contracts.schedule import Action, ScheduleSpec
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import CheckpointError, DataError, InputError
from megatron_run.planning import resolve
from megatron_run_engine.host.process import rounded_products
from megatron_run_engine.runtime.comm import create_groups, patience
from megatron_run_engine.runtime.execute import Executor
from megatron_run_engine.runtime.generation import Network
from megatron_run_engine.runtime.messages import Messenger
from megatron_run_engine.runtime.parameter_init import describe_parameters, fill
from megatron_run_engine.runtime.sample_cut import SampleCut
from megatron_run_engine.training.build import (
    Programs,
    build_chunks,
    make_context,
    make_layers,
    read_fields,
    with_vocabulary,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts import Dataset, ParamInfo, Split
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.runtime.execute import StepInputs, StepRecord
    from megatron_run_engine.runtime.parameter_init import ReadBox
    from megatron_run_engine.runtime.world import World
    from megatron_run_inference.source import Source


#: Keys by which a request names a tokenizer.
_TOKENIZERS = frozenset({"data", "data.use", "data.tokenizer"})


#: Axes of ranks that are split no further than a request asks: layers and schedules would suggest two ranks of some.
_NOT_COPIES = tuple(axis.name for axis in fields(Sizes) if axis.name != "data")


class _ForwardOnly(Schedule):
    """Places layers for any number of stages. Of its actions only the forwards are ever run, by the kernel's plan."""

    info = PluginInfo("schedule", "forward-only", provides=frozenset({"parallel.pipeline"}))

    def actions(self, spec: ScheduleSpec) -> list[list[Action]]:
        """All forwards, then all backwards."""
        every = [Action(op, m, 0) for op in ("F", "B") for m in range(spec.microbatches)]
        return [every for _ in range(spec.stages)]


class _NoText(DataSource):
    """Stands where a model has come without a tokenizer."""

    info = PluginInfo("data", "no-text")

    @property
    def vocab_size(self) -> int:
        """1: the vocabulary of every model covers it."""
        return 1

    def dataset(self, split: Split, sequence_length: int, seed: int) -> Dataset:
        """Raises :class:`DataError`: there are no samples."""
        raise DataError("the model has come without data")


class _RoundingExecutor(Executor):
    """Rounds products of fp32 values as ``train.matmul_precision`` says, in a program that may have chosen its own."""

    def __init__(self, precision: str, *parts: Any) -> None:
        super().__init__(*parts)
        self._precision = precision

    def run(self, program: Sequence[Any], inputs: StepInputs, clock: Callable[[], float] | None = None) -> StepRecord:
        """Run ``program`` to its end."""
        with rounded_products(self._precision):
            return super().run(program, inputs, clock)


def objects() -> list[object]:
    """The plugins that :func:`plan` hands to a run besides those that a configuration names."""
    return [_ForwardOnly(), _NoText()]


def plan(source: Source, request: Request) -> ResolvedRun:
    """The run in which the model of ``source`` is put to use, as ``request`` changes it: sets, plugins, nproc.

    Weights are used in fp32, as they are saved, unless train.precision is set; nothing else of how the model was
    trained is taken over. A tokenizer may be given with the plugin of kind data. No file that ``source`` names as a
    plugin is run, unless ``request`` names it too. Raises :class:`InputError` for ``parallel.sequence``,
    ``context`` and ``chunks``, which only training has, and :class:`DataError` for a tokenizer that is lost.
    """
    found = Found(source.config, f"what is saved in {source.path}")
    base = {
        "train": {"steps": 1, "global_batch_size": _global_batch(request)},
        "parallel": dict.fromkeys(_NOT_COPIES, 1),
        "observer": {"use": []},
    }
    settings = (*request.plugins, *request.sets, *request.values)
    if source.lost is not None and _TOKENIZERS.isdisjoint(setting.partition("=")[0] for setting in settings):
        raise source.lost
    silent = "data" not in source.config and not any(setting.startswith(("data=", "data.")) for setting in settings)
    run = resolve(replace(request, configs=(base, found)), [_ForwardOnly(), *([_NoText()] if silent else [])])
    if run.config.parallel.sequence:
        raise InputError("parallel.sequence=true splits nothing here: a step reads one token of a text")
    if run.config.parallel.context > 1:
        what = f"parallel.context={run.config.parallel.context} splits nothing here: a step reads one token of a text"
        raise InputError(what, fix="leave it at 1")
    if run.config.parallel.chunks > 1:
        raise InputError(f"parallel.chunks={run.config.parallel.chunks} interleaves nothing here", fix="leave it at 1")
    return run


def _global_batch(request: Request) -> int:
    """A global batch of one sample for each copy of the model, whatever their number is: plans must divide it."""
    settings = dict(setting.split("=", 1) for setting in request.sets if "=" in setting)
    values = {**settings, **request.values}
    counts = [values.get(key, 1) for key in ("parallel.data", "parallel.expert")]
    return request.nproc or max(int(count) if str(count).isdecimal() else 1 for count in counts)


def build_network(
    run: ResolvedRun,
    source: Source,
    world: World,
    activity: Activity | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> tuple[Network, DataSource | None]:
    """This rank's part of the model of ``source``, in evaluation mode, and the data whose tokenizer is the model's.

    ``watch`` is told how many of its parts of tensors are read, and of how many. Collective over the world. Raises
    :class:`CheckpointError` where the weights are those of another model.
    """
    activity = activity or Activity()
    topology = Topology(run.sizes, world.rank, (run.layout[0].stage, run.layout[-1].stage))
    activity.enter("start", "the process groups")
    groups = create_groups(topology, timedelta(seconds=patience(run.config.run.timeout)), activity)
    activity.enter("start", "the model")
    made = run.make_data()
    data = None if isinstance(made, _NoText) else made
    options = run.one("model").options
    assert options is not None  # planning has validated them
    device = torch.device(world.device)
    # A model of the data's fields: what packs documents is read as in training when its samples are scored.
    given = (options,) if data is None else (with_vocabulary(run, data), data.fields)
    context = make_context(run, topology, groups, device, *given)
    model, positions, chunks = build_chunks(run, context, make_layers(run, context))
    if not model.predicts_next:
        raise InputError(
            f"{run.one('model')} does not predict the next token",
            why="text is generated and scored token by token",
            fix="megatron-run finetune has its evaluations",
        )
    with activity.within("load"):
        described = [describe_parameters(chunk, topology.tensor_rank) for chunk in chunks]
        read = source.read if watch is None else _watched(source.read, described, watch)
        for chunk, infos in zip(chunks, described, strict=True):
            _check(infos, source)
            fill(infos, read)
            chunk.train(False)
    messenger = Messenger(
        groups.channels,
        topology.peers("pipeline"),
        device,
        model=f"plugin {run.one('model')} of {run.one('model').source}",
        activity=activity,
    )
    precision = run.config.train.matmul_precision
    executor = _RoundingExecutor(precision, chunks, context.gradients, messenger, world.rank, activity)
    forwards = Programs(run, topology.stage, world.backend).forward_only
    reads = read_fields(run, model, positions)
    return Network(context, model, chunks, executor, forwards, reads, SampleCut(), run.layout[-1].stage), data


def _watched(
    read: ReadBox, described: Sequence[dict[Parameter, ParamInfo]], watch: Callable[[int, int], None]
) -> ReadBox:
    """``read``, which tells ``watch`` of each part that is read."""
    total = sum(len(info.parts) for infos in described for info in infos.values())
    done = count(1)

    def read_and_tell(name: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        found = read(name, starts, sizes)
        watch(next(done), total)
        return found

    return read_and_tell


def _check(infos: dict[Parameter, ParamInfo], source: Source) -> None:
    """Raise :class:`CheckpointError` unless ``source`` holds the logical tensors of ``infos`` in their shapes."""
    parts = (part for info in infos.values() for part in info.parts) if source.shapes else ()
    for part in parts:
        found = source.shapes.get(part.name)
        if found == part.shape:
            continue
        there = "missing" if found is None else f"{list(found)}"
        raise CheckpointError(
            f"the weights in {source.path} are of another model",
            why=f"{part.name} is {there} there, {list(part.shape)} here",
            fix="leave out what changes the model",
        )
