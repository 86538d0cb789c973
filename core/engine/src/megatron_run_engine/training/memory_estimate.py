"""How large each rank's part of the model is, without allocating any of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from megatron_run.contracts import mixture_options
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import RunError
from megatron_run.planning.rank_grid import attribute
from megatron_run_engine.runtime.comm import Groups
from megatron_run_engine.runtime.parameter_init import count_parameters, describe_parameters
from megatron_run_engine.training.build import build_chunks, make_context, with_vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel
    from torch.nn import Parameter

    from megatron_run.contracts import CaptureSize, Chunk, GraphCapture, Optimizer, ParamInfo
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.runtime.context import BuildContext


class RankSize(NamedTuple):
    """What a rank of one stage holds: ``parameters``, and ``padding`` values beside them that no model knows.

    ``memory`` is in bytes, by role, as the optimizer says (``Optimizer.memory``).
    """

    parameters: int
    padding: int
    memory: Mapping[str, int]


class Mixture(NamedTuple):
    """The ``layers`` that have experts, ``experts`` each, of which a token meets ``top_k``.

    ``parameters`` are those of all experts of all layers.
    """

    layers: tuple[int, ...]
    experts: int
    top_k: int
    parameters: int

    @property
    def unmet(self) -> int:
        """The parameters that one token does not meet: experts of a layer are of one size."""
        return self.parameters // self.experts * (self.experts - self.top_k)


class ModelSize(NamedTuple):
    """``parameters`` of the whole model, each counted once, and the first rank of each stage.

    A tied embedding counts on every stage that holds a copy of it. ``vocab`` is the number of token ids, and
    ``padded_vocab`` that of rows over all tensor-parallel ranks. ``captures`` is what each stage would capture in a
    step of the full batch; ``mixture`` is None where no layer has experts.
    """

    parameters: int
    stages: tuple[RankSize, ...]
    vocab: int
    padded_vocab: int
    captures: tuple[CaptureSize, ...]
    mixture: Mixture | None


def model_size(run: ResolvedRun) -> ModelSize:
    """Build every stage's chunks on the meta device and count.

    Raises what building the model raises, an error of the user's with where the keys that it names came from.
    """
    try:
        return _model_size(run)
    except RunError as error:
        attribute(error, run.origins)
        raise


def _model_size(run: ResolvedRun) -> ModelSize:
    options = with_vocabulary(run, run.one("data").create())
    total, stages, padded, captures = 0, [], 0, []
    chunks: list[Chunk] = []
    everyone: list[_Built] = []
    for stage in range(run.sizes.pipeline):
        on_ranks = [_build(run, options, stage, expert) for expert in range(run.sizes.expert)]
        total += count_parameters(info for rank in on_ranks for info in rank.held.values())
        context, held = on_ranks[0].context, on_ranks[0].held
        stages.append(_rank_size(held, _memory(run, on_ranks[0])))
        captures.append(_capture_size(run, on_ranks[0], stage))
        chunks += on_ranks[0].chunks
        everyone += on_ranks
        padded = max(padded, _rows_over(context.vocab_size, held) * run.sizes.tensor)
    _check_capture(run, context, chunks)
    return ModelSize(total, tuple(stages), context.vocab_size, padded, tuple(captures), _mixture(options, everyone))


class _Built(NamedTuple):
    """A rank's part of the model, without values."""

    context: BuildContext
    chunks: Sequence[Chunk]
    infos: Sequence[dict[Parameter, ParamInfo]]

    @property
    def held(self) -> dict[Parameter, ParamInfo]:
        """All of its parameters."""
        return {parameter: info for described in self.infos for parameter, info in described.items()}


def _build(run: ResolvedRun, options: BaseModel, stage: int, expert: int) -> _Built:
    """Of the first tensor-parallel rank of ``stage`` that holds the experts of expert-parallel rank ``expert``."""
    first = Topology(run.sizes, 0)
    topology = Topology(run.sizes, first.rank_at(tensor=0, context=0, data=expert, stage=stage))
    context = make_context(run, topology, Groups(), torch.device("meta"), options)
    _, _, chunks = build_chunks(run, context)
    return _Built(context, chunks, [describe_parameters(chunk) for chunk in chunks])


def _mixture(options: BaseModel, ranks: Sequence[_Built]) -> Mixture | None:
    """The experts of all ``ranks``, where the model's ``options`` say how many there are and how many a token meets."""
    told = mixture_options(options)
    if told is None or not told.experts:
        return None
    layers, parameters = set[int](), 0
    for rank in ranks:
        split = {parameter: info for parameter, info in rank.held.items() if info.replicas == "expert_data"}
        segments = (segment for chunk in rank.chunks for segment in chunk.segments())
        layers |= {segment.layer for segment in segments if not split.keys().isdisjoint(segment.params)}
        parameters += count_parameters(split.values())
    return Mixture(tuple(sorted(layers)), told.experts, told.top_k, parameters) if layers else None


def _capture_size(run: ResolvedRun, built: _Built, stage: int) -> CaptureSize:
    """What graph capture would make of the segments of ``stage``."""
    capture = cast("GraphCapture", run.one("graph-capture").create(context=built.context))
    regions = capture.regions([chunk.segments() for chunk in built.chunks])
    return capture.plan(regions, run.plans[max(run.plans)].lists[stage])


def _check_capture(run: ResolvedRun, context: BuildContext, chunks: Sequence[Chunk]) -> None:
    """Have graph capture choose as if one rank held all ``chunks``: it alone sees what no stage publishes."""
    alone = replace(context, topology=Topology(Sizes(), 0))
    capture = cast("GraphCapture", run.one("graph-capture").create(context=alone))
    capture.regions([chunk.segments() for chunk in chunks])


def _rank_size(held: Mapping[Parameter, ParamInfo], memory: Mapping[str, int]) -> RankSize:
    real = sum(_values(parameter, info) for parameter, info in held.items())
    return RankSize(real, sum(parameter.numel() for parameter in held) - real, memory)


def _memory(run: ResolvedRun, rank: _Built) -> Mapping[str, int]:
    """What the optimizer would hold, from one that is attached to parameters without values, and the copy of a save."""
    optimizer = cast("Optimizer", run.one("optimizer").create(context=rank.context))
    optimizer.attach(rank.chunks, rank.infos, grad_scale=1 / run.sizes.data)
    memory = optimizer.memory()
    if run.config.checkpoint.async_save:
        memory = {**memory, "staging": sum(piece.tensor.nbytes for piece in optimizer.iter_state())}
    return memory


def _rows_over(vocab: int, held: Mapping[Parameter, ParamInfo]) -> int:
    """The rows that a rank holds of a matrix over the vocabulary; 0 where it has none."""
    matrices = (p for p, info in held.items() if any(part.shape[0] == vocab and p.ndim > 1 for part in info.parts))
    return max((len(matrix) for matrix in matrices), default=0)


def _values(parameter: Parameter, info: ParamInfo) -> int:
    """The values of ``parameter`` that belong to a logical tensor."""
    per_row = parameter.numel() // parameter.shape[0]
    return sum(len(part.local) * per_row for part in info.parts)
