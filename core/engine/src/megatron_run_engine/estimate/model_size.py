"""Estimates the parameters and memory of each rank from a model on the meta device, which allocates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_run.contracts import Lender, Microbatch, mixture_of
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import InputError, RunError
from megatron_run.errors.wording import advice, did_you_mean
from megatron_run.planning.rank_grid import attribute
from megatron_run_engine.runtime.comm import Groups
from megatron_run_engine.runtime.parameter_init import (
    count_parameters,
    describe_parameters,
    frozen,
    shapes_of,
)
from megatron_run_engine.training.build import (
    attach,
    build_chunks,
    check_fields,
    make_context,
    make_layers,
    with_vocabulary,
)
from megatron_run_engine.training.checked_plugins import module_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel
    from torch.nn import Parameter

    from megatron_run.contracts import CaptureSize, Chunk, DataSource, Model, ParamInfo
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.runtime.context import BuildContext


#: The most layers that are built to be counted, a stage as one more: each takes some 20 milliseconds. The most of all
#: expert-parallel ranks; and the most that are run besides, to count what they keep, which takes ten times as long.
MOST_BUILT, MOST_OF_RANKS, MOST_RUN = 1_000, 10_000, 200


def layers_to_build(run: ResolvedRun) -> int:
    """How many layers one expert-parallel rank of every stage has, with one for whatever else a stage has."""
    return sum(len(place.layers) for place in run.layout) + run.sizes.pipeline


def why_not_built(run: ResolvedRun) -> str:
    """Why the layers of ``run`` are too many to be built one by one; empty where they are not."""
    layers, ranks = layers_to_build(run), run.sizes.expert
    if layers > MOST_BUILT:
        return f"{layers:,} layers and stages would be built one by one, and at most {MOST_BUILT:,} are"
    if layers * ranks > MOST_OF_RANKS:
        most = f"at most {MOST_OF_RANKS:,} are"
        return f"{layers:,} layers and stages of {ranks:,} expert-parallel ranks would be built one by one, and {most}"
    return ""


#: The roles of two steps in the memory of a host: those of a rank, and those of the rank whose copies it keeps.
IN_MEMORY, FOR_NEIGHBOUR = "host_steps", "host_neighbour_steps"


class RankSize(NamedTuple):
    """The ``parameters`` of a rank of one stage, and the ``padding`` values that belong to no logical tensor.

    ``memory`` maps a role to bytes, from ``Optimizer.memory``.
    """

    parameters: int
    padding: int
    memory: Mapping[str, int]


class Mixture(NamedTuple):
    """A mixture of experts: which ``layers`` have ``experts`` experts, ``top_k`` of them active for a token.

    ``parameters`` counts all experts of all these layers.
    """

    layers: tuple[int, ...]
    experts: int
    top_k: int
    parameters: int

    @property
    def inactive(self) -> int:
        """Expert parameters that are inactive for one token. All experts have the same size."""
        return self.parameters // self.experts * (self.experts - self.top_k)


class ModelSize(NamedTuple):
    """``parameters`` of the whole model, each counted once, and the size of the first rank of each of the ``stages``.

    A tied embedding counts on every stage that holds a copy of it. ``vocab`` is the number of token ids, and
    ``padded_vocab`` the number of embedding rows over all tensor-parallel ranks. ``captures`` is what graph capture
    would record on each stage in a step of the full batch, and ``captured`` the names of the segments that it records.
    ``mixture`` is None if no layer has experts. ``beside`` are the bytes that a message holds beside the residual
    stream, 0 where no stage sends any. ``shapes`` are those of the logical tensors that initial weights must have: of
    the frozen ones, where only adapters learn.
    """

    parameters: int
    stages: tuple[RankSize, ...]
    vocab: int
    padded_vocab: int
    captures: tuple[CaptureSize, ...]
    captured: tuple[str, ...]
    mixture: Mixture | None
    beside: int
    shapes: Mapping[str, tuple[int, ...]]


def model_size(run: ResolvedRun) -> ModelSize:
    """Build every stage's chunks on the meta device and count.

    Raises what building the model raises. A :class:`RunError` gets the origins of the configuration keys that it names.
    """
    try:
        return _model_size(run)
    except RunError as error:
        attribute(error, run.origins)
        raise


def _model_size(run: ResolvedRun) -> ModelSize:
    data = run.make_data()
    options = with_vocabulary(run, data)
    total, stages, padded, captures, captured = 0, [], 0, [], dict[str, None]()
    chunks: list[Chunk] = []
    everyone: list[_Built] = []  # one rank of each stage and expert-parallel index
    for stage in range(run.sizes.pipeline):
        on_ranks = [_build(run, options, data, stage, expert) for expert in range(run.sizes.expert)]
        total += count_parameters(info for rank in on_ranks for info in rank.held.values())
        context, held = on_ranks[0].context, on_ranks[0].held
        stages.append(_rank_size(held, _memory(run, on_ranks[0])))
        recorded, names = _capture_size(run, on_ranks[0], stage)
        captures.append(recorded)
        captured |= dict.fromkeys(names)
        chunks += on_ranks[0].chunks
        everyone += on_ranks
        padded = max(padded, _rows_over(context.vocab_size, held) * run.sizes.tensor)
    _check_segments(run, chunks)
    # What one stage lacks may be of another: only a rank with all chunks can refuse a name.
    alone = replace(context, topology=Topology(Sizes(), 0))
    make_layers(run, alone).check_names([module_of(chunk) for chunk in chunks])
    _check_capture(run, alone, chunks)
    mixture, beside = _mixture(options, everyone), _beside(run, on_ranks[0].model) if run.sizes.pipeline > 1 else 0
    counts = (context.vocab_size, padded)
    graphs = (tuple(captures), tuple(captured))
    return ModelSize(total, tuple(stages), *counts, *graphs, mixture, beside, _shapes(everyone))


def _shapes(ranks: Sequence[_Built]) -> Mapping[str, tuple[int, ...]]:
    infos = [described for rank in ranks for described in rank.infos]
    kept = [frozen(described) for described in infos]
    return shapes_of(kept if any(kept) else infos)


class _Built(NamedTuple):
    """A rank's part of the model on the meta device."""

    context: BuildContext
    model: Model
    chunks: Sequence[Chunk]
    infos: Sequence[dict[Parameter, ParamInfo]]

    @property
    def held(self) -> dict[Parameter, ParamInfo]:
        """All parameters of the rank."""
        return {parameter: info for described in self.infos for parameter, info in described.items()}


def _build(run: ResolvedRun, options: BaseModel, data: DataSource, stage: int, expert: int) -> _Built:
    """Build the first tensor-parallel rank of ``stage`` that holds the experts of expert-parallel rank ``expert``."""
    first = Topology(run.sizes, 0)
    topology = Topology(run.sizes, first.rank_at(data=expert, stage=stage))
    context = make_context(run, topology, Groups(), torch.device("meta"), options, data.fields)
    model, _, chunks = build_chunks(run, context, make_layers(run, context))
    check_fields(run, model, data)
    return _Built(context, model, chunks, [describe_parameters(chunk) for chunk in chunks])


def _beside(run: ResolvedRun, model: Model) -> int:
    """Bytes beside the stream in a message of a step's first microbatch; sizes that only senders know count as 1."""
    train = run.config.train
    length = train.sequence_length // run.sizes.context
    boundary = model.boundary(Microbatch(0, 1, 0, {}), train.micro_batch_size, length)
    return sum(prod(size or 1 for size in each.shape) * each.dtype.itemsize for each in boundary.beside.values())


def _mixture(options: BaseModel, ranks: Sequence[_Built]) -> Mixture | None:
    """Count the experts over all ``ranks``. None unless the model's ``options`` have experts."""
    experts = mixture_of(options)
    if experts is None or not experts.count:
        return None
    layers, parameters = set[int](), 0
    for rank in ranks:
        split = {parameter: info for parameter, info in rank.held.items() if info.replicas == "expert_replicas"}
        segments = (segment for chunk in rank.chunks for segment in chunk.segments())
        layers |= {segment.layer for segment in segments if not split.keys().isdisjoint(segment.params)}
        parameters += count_parameters(split.values())
    return Mixture(tuple(sorted(layers)), experts.count, experts.top_k, parameters) if layers else None


def _capture_size(run: ResolvedRun, built: _Built, stage: int) -> tuple[CaptureSize, list[str]]:
    """Return what graph capture would record of ``stage``, and the names of the segments in it."""
    capture = run.make_graph_capture(built.context)
    regions = capture.regions([chunk.segments() for chunk in built.chunks])
    names = [segment.name for region in regions for segment in region.segments]
    return capture.plan(regions, run.plans[max(run.plans)].lists[stage]), names


def _check_segments(run: ResolvedRun, chunks: Sequence[Chunk]) -> None:
    """Raise :class:`InputError` for a name in ``train.recompute`` or ``train.offload`` that ``chunks`` do not have."""
    segments = [segment for chunk in chunks for segment in chunk.segments()]
    published = list(dict.fromkeys(segment.name for segment in segments))
    parts = dict.fromkeys(part for segment in segments for part in segment.parts)
    train = run.config.train
    for key, asked, known in (
        ("recompute", train.recompute, [*published, *parts]),
        ("offload", train.offload, published),
    ):
        unknown = [name for name in asked if name not in known] if isinstance(asked, tuple) else []
        if unknown:
            raise InputError(
                f"train.{key} names {unknown[0]!r}, which no layer publishes",
                fix=advice(did_you_mean(unknown[0], known), f"the choices are none, full, {', '.join(known)}"),
            )


def _check_capture(run: ResolvedRun, context: BuildContext, chunks: Sequence[Chunk]) -> None:
    """Let graph capture choose regions as if one rank held all ``chunks``, that of ``context``."""
    capture = run.make_graph_capture(context)
    capture.regions([chunk.segments() for chunk in chunks])


def _rank_size(held: Mapping[Parameter, ParamInfo], memory: Mapping[str, int]) -> RankSize:
    real = sum(_values(parameter, info) for parameter, info in held.items())
    return RankSize(real, sum(parameter.numel() for parameter in held) - real, memory)


def _memory(run: ResolvedRun, rank: _Built) -> Mapping[str, int]:
    """Return the bytes of an optimizer attached to meta parameters, and of the copies of its state on the host."""
    optimizer = run.make_optimizer(rank.context)
    attach(run, optimizer, rank.chunks, rank.infos)
    memory = optimizer.memory()
    if (idle := frozen(rank.held)) and not isinstance(optimizer, Lender):
        memory = {**memory, "frozen": sum(parameter.nbytes for parameter in idle)}
    saving, saved = run.config.checkpoint, sum(piece.tensor.nbytes for piece in optimizer.iter_state())
    copies = saving.async_save + bool(saving.memory_interval.amount)  # each thread that saves has its own
    if copies:
        memory = {**memory, "staging": copies * saved}
    if saving.memory_interval.amount:
        memory = {**memory, IN_MEMORY: 2 * saved}
        if run.sizes.world > 1:
            memory = {**memory, FOR_NEIGHBOUR: 2 * saved}
    return memory


def _rows_over(vocab: int, held: Mapping[Parameter, ParamInfo]) -> int:
    """Return the rows that a rank holds of a matrix over the vocabulary, 0 if it holds none."""
    # A matrix of several parts, as queries, keys and values, only happens to have as many rows in one of them.
    alone = ((parameter, info.parts[0]) for parameter, info in held.items() if len(info.parts) == 1)
    return max((len(each) for each, part in alone if part.shape[0] == vocab and each.ndim > 1), default=0)


def _values(parameter: Parameter, info: ParamInfo) -> int:
    """Count the values of ``parameter`` that belong to a logical tensor."""
    per_row = parameter.numel() // parameter.shape[0]
    return sum(len(part.local) * per_row for part in info.parts)
