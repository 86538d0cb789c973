"""Builds the objects of one rank from a resolved run, in the order of their dependencies."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron_run.config.origin import DEFAULT
from megatron_run.contracts import Lender, ModelOptions
from megatron_run.contracts.activity import Activity
from megatron_run.contracts.data import DOCUMENTS, LABELS, LOSS_MASK, TOKENS, as_fields
from megatron_run.contracts.topology import Topology
from megatron_run.errors import InputError
from megatron_run.pipeline.lower import lower
from megatron_run.pipeline.verify import forward_plan
from megatron_run_engine.runtime.comm import ALONE, Groups, ParallelGroup, create_groups, patience
from megatron_run_engine.runtime.context import BuildContext, Dtypes
from megatron_run_engine.runtime.execute import Executor
from megatron_run_engine.runtime.generation import Network
from megatron_run_engine.runtime.gradients import GradientAccumulator
from megatron_run_engine.runtime.messages import Messenger
from megatron_run_engine.runtime.metrics import Metrics
from megatron_run_engine.runtime.offload import make_offload
from megatron_run_engine.runtime.parameter_init import describe_parameters, frozen, initialise, trained
from megatron_run_engine.runtime.returned_memory import returned_when_freed
from megatron_run_engine.runtime.rng import RandomStreams
from megatron_run_engine.runtime.sample_cut import SampleCut
from megatron_run_engine.runtime.segments import SegmentRunner
from megatron_run_engine.training.checked_plugins import CheckedLayers, CheckedScaler, module_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pydantic import BaseModel

    from megatron_run.contracts import (
        Adapters,
        Chunk,
        DataSource,
        Field,
        GraphCapture,
        Model,
        Optimizer,
        ParallelLayers,
        ParamInfo,
    )
    from megatron_run.pipeline.lower import Instruction
    from megatron_run.pipeline.plan import Plan
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.runtime.world import World


#: How many actions ahead a receive is posted if each direction between two stages has its own channel (gloo).
LOOKAHEAD = 1


class Programs:
    """The programs of ``stage``, lowered from plans and cached by their number of microbatches."""

    def __init__(self, run: ResolvedRun, stage: int, backend: str) -> None:
        self._run, self._stage = run, stage
        # NCCL runs the sends and receives of a pair of ranks in the order of their calls, and a receive that waits
        # blocks what follows it. There every message is issued at its place in one global order: no look-ahead.
        self._lookahead = LOOKAHEAD if backend == "gloo" else None
        self._training: dict[int, tuple[Instruction, ...]] = {}
        self._forward_only: dict[int, tuple[Instruction, ...]] = {}

    def training(self, microbatches: int) -> tuple[Instruction, ...]:
        """Return the program of a step of ``microbatches``, as the schedule planned it."""
        if microbatches not in self._training:
            self._training[microbatches] = self._lower(self._run.plans[microbatches])
        return self._training[microbatches]

    def forward_only(self, microbatches: int) -> tuple[Instruction, ...]:
        """Return the program of ``microbatches`` forwards without backwards, from the kernel's own plan."""
        if microbatches not in self._forward_only:
            stages, chunks = self._run.sizes.pipeline, self._run.config.parallel.chunks
            self._forward_only[microbatches] = self._lower(forward_plan(self._run.layout, stages, chunks, microbatches))
        return self._forward_only[microbatches]

    def _lower(self, plan: Plan) -> tuple[Instruction, ...]:
        return lower(plan, self._stage, self._lookahead)


#: Types by ``train.precision``. 16-bit parameters have fp32 master weights.
DTYPES: Mapping[str, Dtypes] = MappingProxyType(
    {
        "fp32": Dtypes(param=torch.float32, main=torch.float32),
        "bf16": Dtypes(param=torch.bfloat16, main=torch.float32),
        "fp16": Dtypes(param=torch.float16, main=torch.float32),
    }
)


@dataclass(frozen=True)
class Assembly:
    """Everything that one rank trains with. ``positions`` are the positions of its chunks in the layout.

    ``infos`` describe the chunks' parameters, of which the frozen ones wait for ``adapters``. ``network`` is the model
    as what scores and writes tokens sees it.
    """

    context: BuildContext
    data: DataSource
    model: Model
    positions: tuple[int, ...]
    chunks: Sequence[Chunk]
    infos: Sequence[dict[nn.Parameter, ParamInfo]]
    adapters: Adapters | None
    optimizer: Optimizer
    scaler: CheckedScaler
    graph_capture: GraphCapture
    executor: Executor
    programs: Programs
    network: Network

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a token's forward and backward, as the model's options tell its costs."""
        options, length = self.context.model, self.context.train.sequence_length
        assert isinstance(options, ModelOptions)  # planning has checked them
        return options.costs(length, self.context.vocab_size).flops_per_token

    def values(self) -> Iterator[tuple[nn.Parameter, ParamInfo]]:
        """Each parameter of this rank, which has its values until the next one is asked for.

        Collective over the ranks that divide them: each asks for all.
        """
        for described in self.infos:
            for parameter, info in described.items():
                self.optimizer.ensure_ready((parameter,))
                yield parameter, info
                if isinstance(self.optimizer, Lender):
                    self.optimizer.release((parameter,))


def build(run: ResolvedRun, world: World, activity: Activity | None = None) -> Assembly:
    """Build this rank's part of ``run``. Collective over the world. ``activity`` records what the rank is doing."""
    data = run.make_data()
    topology = Topology(run.sizes, world.rank, (run.layout[0].stage, run.layout[-1].stage))
    activity = Activity() if activity is None else activity
    activity.enter("start", "the process groups")
    groups = create_groups(topology, timedelta(seconds=patience(run.config.run.timeout)), activity)
    activity.enter("start", "the model")
    context = make_context(run, topology, groups, torch.device(world.device), with_vocabulary(run, data), data.fields)
    optimizer = run.make_optimizer(context)
    context = replace(context, lends=isinstance(optimizer, Lender))
    # To be lent a parameter is built whole, and taken away at once: its memory must not leave a gap in the heap.
    with returned_when_freed(context.device) if context.lends else nullcontext():
        layers = make_layers(run, context)
        model, positions, chunks = build_chunks(run, context, layers)
        layers.check_names([module_of(chunk) for chunk in chunks])
        check_fields(run, model, data)
        modules = (module for chunk in chunks for _, module in chunk.named_modules())
        context.segments.keep_on_device(buffer for module in modules for buffer in module.buffers(recurse=False))
        infos = [describe_parameters(chunk, topology.tensor_rank) for chunk in chunks]
        for described in infos:
            initialise(described, run.config.train.seed)
            for parameter, info in (trained(described) if layers.adapters() else described).items():
                context.gradients.adopt(parameter, info.name)
        attach(run, optimizer, chunks, infos)
    lender = optimizer if isinstance(optimizer, Lender) else None
    if lender is not None:
        context.gradients.borrow_from(lender)
    context.segments.read_parameters_after(optimizer.ensure_ready, None if lender is None else lender.release)
    messenger = Messenger(
        groups.channels,
        topology.peers("pipeline"),
        context.device,
        model=f"plugin {run.one('model')} of {run.one('model').source}",
        sharers=_message_sharers(run, topology, groups),
        activity=groups.activity,
    )
    executor = Executor(chunks, context.gradients, messenger, world.rank, groups.activity)
    programs = Programs(run, topology.stage, world.backend)
    reads, last = read_fields(run, model, positions), run.layout[-1].stage
    cut = SampleCut.of(context.pieces, data.fields)
    return Assembly(
        context=context,
        data=data,
        model=model,
        positions=positions,
        chunks=chunks,
        infos=infos,
        adapters=layers.adapters(),
        optimizer=optimizer,
        scaler=CheckedScaler(run.make_scaler(context), run.one("scaler")),
        graph_capture=run.make_graph_capture(context),
        executor=executor,
        programs=programs,
        network=Network(context, model, chunks, executor, programs.forward_only, reads, cut, last),
    )


def attach(
    run: ResolvedRun,
    optimizer: Optimizer,
    chunks: Sequence[Chunk],
    infos: Sequence[dict[nn.Parameter, ParamInfo]],
) -> None:
    """Let ``optimizer`` take over the parameters of ``chunks``.

    Raises :class:`InputError` where rows are to be scaled after an update and it does not.
    """
    scaled = [info.name for described in infos for info in described.values() if info.row_factors is not None]
    if scaled and not optimizer.scales_rows:
        raise InputError(
            f"optimizer={run.one('optimizer').name} does not scale rows after an update, as {scaled[0]} asks for",
            why="model.attention.qk_clip shrinks the rows that make queries and keys",
            fix="leave it out, or choose --plugin optimizer=zero1",
        )
    if isinstance(optimizer, Lender):
        optimizer.hold([frozen(described) for described in infos])
    optimizer.attach(chunks, [trained(described) for described in infos], grad_scale=1 / run.sizes.data)


def _message_sharers(run: ResolvedRun, topology: Topology, groups: Groups) -> ParallelGroup:
    """Return the ranks that each send an equal part of the same message between stages."""
    # With sequence parallelism each rank's message is already its own part of the sequence.
    parallel = run.config.parallel
    return groups.parallel_group(topology, "tensor") if parallel.scatter_messages and not parallel.sequence else ALONE


def with_vocabulary(run: ResolvedRun, data: DataSource) -> BaseModel:
    """Return the model's options, with ``vocab_size`` taken from ``data`` unless the user set it.

    Raises :class:`InputError` if the data has token ids that the model lacks.
    """
    options = run.one("model").options
    assert isinstance(options, ModelOptions)  # planning has checked them
    chosen = options.vocab_size
    if chosen is None:
        return options.model_copy(update={"vocab_size": data.vocab_size})
    if chosen < data.rows:
        origin = run.origins.get(("model", "vocab_size"), DEFAULT)
        fix = f"leave model.vocab_size out, or set it to at least {data.vocab_size}"
        if origin.source == "found":  # the weights there have so many rows
            fix = "name the tokenizer that the model was trained with: --plugin data=text,tokenizer=FILE"
        what = f"model.vocab_size={chosen} is smaller than the data's vocabulary of {data.vocab_size}"
        said = run.origins.get(("data", "vocab_size"), DEFAULT)
        why = "" if said == DEFAULT else f"data.vocab_size={data.vocab_size}, from {said}"
        raise InputError(what, why=why, origin=str(origin), fix=fix)
    return options


def make_context(
    run: ResolvedRun,
    topology: Topology,
    groups: Groups,
    device: torch.device,
    model: BaseModel,
    fields: Iterable[Field] = (TOKENS, LABELS, LOSS_MASK),
) -> BuildContext:
    """Return the context that the plugin factories of this rank receive; ``fields`` are those of the data."""
    rng, metrics = (
        RandomStreams(run.config.train.seed, device, topology.tensor_rank, topology.context_rank),
        Metrics(device),
    )
    return BuildContext(
        topology=topology,
        groups=groups,
        device=device,
        dtypes=DTYPES[run.config.train.precision],
        model=model,
        train=run.config.train,
        run=run.config.run,
        gradients=GradientAccumulator(),
        rng=rng,
        metrics=metrics,
        segments=SegmentRunner(rng, make_offload(run.config.train, device, metrics)),
        log=logging.getLogger("megatron_run"),
        sequence_shards=run.sizes.tensor if run.config.parallel.sequence else 1,
        fields=frozenset(field.name for field in fields),
    )


def check_fields(run: ResolvedRun, model: Model, data: DataSource) -> None:
    """Raise :class:`InputError` where the chunks of ``model`` ask for a field that ``data`` does not have.

    So too where ``data`` packs documents and a position with layers would let attention cross them.
    """
    found = {field.name: field for field in data.fields}
    network, source = run.one("model"), run.one("data")
    for position, place in enumerate(run.layout):
        asked = as_fields(model.fields(position, run.layout))
        for field in asked:
            if field != found.get(field.name):
                has = str(found.get(field.name, "")) or ", ".join(found)
                raise InputError(
                    f"model={network.name} needs the field {field}, and data={source.name} has {has}",
                    fix=f"choose data that has it, or another model; {source.name} declares DataSource.fields",
                )
        if place.layers and DOCUMENTS in found.values() and DOCUMENTS not in asked:
            raise InputError(
                f"data={source.name} packs documents, and attention of model={network.name} would cross them",
                why=f"its chunk at position {position} does not ask for the field documents",
                fix="set data.packing to another choice, or choose a model that asks for it, as gpt does",
            )


def make_layers(run: ResolvedRun, context: BuildContext) -> CheckedLayers:
    """Return the factory of layers: the chosen ones, each stacked on the one before."""
    layers: ParallelLayers | None = None
    for plugin in run.plugins["parallel-layer"]:
        layers = plugin.create(context=context, base=layers)
    assert layers is not None  # planning adds the default factory
    name = "+".join(plugin.name for plugin in run.plugins["parallel-layer"])
    return CheckedLayers(layers, f"parallel-layer={name}", context.pieces)


def build_chunks(
    run: ResolvedRun, context: BuildContext, layers: ParallelLayers
) -> tuple[Model, tuple[int, ...], list[Chunk]]:
    """Return the model, and the positions and uninitialised chunks of this stage by ascending chunk number.

    Raises :class:`InputError` for a tensor whose size in bytes no 64-bit integer holds, on the meta device too.
    """
    model = run.make_model(context)
    # Said by the class itself: one that derives from another may look at tokens further on, which other ranks hold.
    if context.pieces.ranks > 1 and not vars(type(model)).get("computes_pieces", False):
        raise InputError(
            f"model={run.one('model').name} computes whole samples, and parallel.context={context.pieces.ranks} splits "
            "their tokens",
            fix="set parallel.context=1, or choose a model that computes pieces, as gpt does",
        )
    places = [(place.chunk, index) for index, place in enumerate(run.layout) if place.stage == context.topology.stage]
    positions = tuple(position for _, position in sorted(places))
    shared: dict[str, nn.Parameter] = {}  # tied parameters: one Parameter for all chunks of this rank that hold it
    try:
        chunks = [model.build_chunk(position, run.layout, layers, shared) for position in positions]
    except (RuntimeError, OverflowError) as cause:
        if "overflow" not in str(cause):
            raise
        raise InputError(
            "the model has a tensor that is larger than any memory",
            why=str(cause).partition("\n")[0],
            fix="lower model.hidden_size, or what else is large among the keys of model and train.sequence_length",
        ) from cause
    for chunk in chunks:
        layers.finish(module_of(chunk))
    return model, positions, chunks


def read_fields(run: ResolvedRun, model: Model, positions: Iterable[int]) -> tuple[str, ...]:
    """The names of the fields of a sample that the chunks at ``positions`` of the layout read."""
    wanted = [field.name for position in positions for field in as_fields(model.fields(position, run.layout))]
    return tuple(dict.fromkeys(wanted))
