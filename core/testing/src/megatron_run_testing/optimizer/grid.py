"""Promises of every optimizer on ranks with several chunks, and on the stages of a pipeline that share a weight.

Callbacks come as in :mod:`megatron_run_engine.runtime.gradients`: the backwards end chunk by chunk, the last one first,
and ``grad_ready`` is called from the second step on, when it is known which arrival is the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_run.contracts import Init, ParameterSpec
from megatron_run.contracts.topology import Sizes
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.parameter_init import describe_parameters, shapes_of
from megatron_run_testing.optimizer.alone import expect, expect_same
from megatron_run_testing.optimizer.bench import (
    Bench,
    OptimizerFactory,
    SavedState,
    Shape,
    SmallChunk,
    add_gradient,
    gradients,
    numbers_of,
    values_of,
)
from megatron_run_testing.optimizer.together import MAX_NORM, STEPS, of_all, saved_pieces

#: Chunks of each stage.
_CHUNKS = 2
#: By which gradients are multiplied besides the mean, so that one that comes too late is seen on one rank too.
_SCALE = 0.5
#: The name of the weight that the ends of a pipeline share.
_TIED = "tied.weight"


class StageRun(NamedTuple):
    """One rank's results: the ``sizes`` of its grid, and per step numbers (found_inf, norm, zeros) and parameters.

    ``loaded`` are the parameters of a new optimizer that loaded the state of all ranks, before and after the last step.
    """

    sizes: Sizes
    numbers: list[Tensor]
    values: list[dict[str, Tensor]]
    loaded: list[dict[str, Tensor]]


class Stage:
    """An optimizer attached to the chunks of one stage."""

    def __init__(self, factory: OptimizerFactory, context: BuildContext) -> None:
        self._topology = context.topology
        chunks = [SmallChunk(context.dtypes.param, context.device) for _ in range(_CHUNKS)]
        for index, chunk in enumerate(chunks):
            chunk.parameter_specs = _specs(self._topology.sizes, self._topology.stage, index)
        self.infos = [describe_parameters(chunk) for chunk in chunks]
        self.optimizer = factory(context)
        self.optimizer.attach(chunks, self.infos, _SCALE / self._topology.sizes.data)
        self._one = torch.ones(1, device=context.device)

    def step(self, step: int) -> Tensor:
        """A whole step as in the trainer; returns found_inf, norm and zeros, fp32 [3]."""
        self.optimizer.zero_grad()
        for chunk in reversed(range(_CHUNKS)):
            self._backward(step, chunk)
            self.optimizer.start_grad_sync(chunk)
        self.optimizer.finish_grad_sync()
        numbers = numbers_of(self.optimizer, self._one, MAX_NORM)
        self.optimizer.step(0.01, 0.1)
        self.optimizer.start_param_sync()
        for described in self.infos:
            self.optimizer.ensure_ready(described)
        return numbers

    def values(self) -> dict[str, Tensor]:
        """A copy of the parameters by name."""
        named = {info.name: parameter for each in self.infos for parameter, info in each.items()}
        return values_of(self.optimizer, named)

    def _backward(self, step: int, chunk: int) -> None:
        """The gradients of ``chunk`` arrive: in another order on every second rank, as nothing promises one."""
        found = _gradients(step, self._topology.stage, chunk, self._topology.data_rank)
        arrivals: list[tuple[Parameter, Tensor]] = list(zip(self.infos[chunk], found, strict=True))
        for parameter, gradient in arrivals if self._topology.data_rank % 2 else reversed(arrivals):
            add_gradient(self.optimizer, parameter, gradient.to(self._one.device))
            if step > 0:
                self.optimizer.grad_ready(parameter)


def train_chunks(factory: OptimizerFactory, context: BuildContext) -> StageRun:
    """Train this rank's chunks, then repeat the last step from the state of all ranks."""
    sizes, stage = context.topology.sizes, Stage(factory, context)
    run, pieces = StageRun(sizes, [], [], []), []
    for step in range(STEPS):
        if step == STEPS - 1:
            pieces = of_all(saved_pieces(stage.optimizer), sizes.world)
        run.numbers.append(stage.step(step))
        run.values.append(stage.values())
    fresh = Stage(factory, context)
    fresh.optimizer.load_state(SavedState(pieces, _shapes(sizes)))
    run.loaded.append(fresh.values())
    fresh.step(STEPS - 1)
    run.loaded.append(fresh.values())
    return run


def train_stages(factory: OptimizerFactory, context: BuildContext) -> StageRun:
    """As :func:`train_chunks`, for a grid with stages."""
    return train_chunks(factory, context)


def judge_chunks(factory: OptimizerFactory, runs: Sequence[StageRun]) -> None:
    """Every chunk holds what one rank learns with its gradients, clipped by the norm over all; so does a new one."""
    sizes = runs[0].sizes
    places = [(stage, chunk) for stage in range(sizes.pipeline) for chunk in range(_CHUNKS)]
    alone = {place: Bench(factory) for place in places}
    for step in range(STEPS):
        expected, norm, zeros = _expected(sizes, step)
        for rank, run in enumerate(runs):
            expect(f"step {step}, rank {rank}: the norm", run.numbers[step][1], norm)
            expect(f"step {step}, rank {rank}: the zeros", run.numbers[step][2], zeros)
        for place, bench in alone.items():
            names = _names(sizes, *place)
            bench.step((expected[names[0]], expected[names[1]]))
            for rank, run in enumerate(runs):
                for name, value in zip(names, bench.values().values(), strict=True):
                    if name in run.values[step]:
                        expect(f"step {step}, rank {rank}: {name}", run.values[step][name], value)
    for rank, run in enumerate(runs):
        expect_same(f"rank {rank} after the state was loaded", run.loaded[0], run.values[-2])
        expect_same(f"rank {rank} a step after the state was loaded", run.loaded[1], run.values[-1])


def _expected(sizes: Sizes, step: int) -> tuple[dict[str, Tensor], float, float]:
    """The reduced and clipped gradients by name, and the norm and the zeros before."""
    found: dict[str, Tensor] = {}
    for stage in range(sizes.pipeline):
        for chunk in range(_CHUNKS):
            ranks = [_gradients(step, stage, chunk, rank) for rank in range(sizes.data)]
            for name, parts in zip(_names(sizes, stage, chunk), zip(*ranks, strict=True), strict=True):
                mean = _SCALE * torch.stack(parts).mean(0)
                found[name] = found[name] + mean if name in found else mean
    every = torch.cat([gradient.flatten() for gradient in found.values()]).double()
    norm = float(every.norm())
    factor = torch.tensor(min(1.0, MAX_NORM / (norm + 1e-6)))
    return {name: gradient * factor for name, gradient in found.items()}, norm, float((every == 0).sum())


def _gradients(step: int, stage: int, chunk: int, data_rank: int) -> tuple[Tensor, Tensor]:
    return gradients(step, data_rank + 64 * (chunk + _CHUNKS * stage))


def _names(sizes: Sizes, stage: int, chunk: int) -> tuple[str, str]:
    """The names of a chunk's weight and bias. The first and last chunk of several stages share their weight."""
    place = f"stage{stage}.chunk{chunk}"
    tied = sizes.pipeline > 1 and (stage, chunk) in ((0, 0), (sizes.pipeline - 1, _CHUNKS - 1))
    return _TIED if tied else f"{place}.weight", f"{place}.bias"


def _specs(sizes: Sizes, stage: int, chunk: int) -> dict[str, ParameterSpec]:
    weight, bias = _names(sizes, stage, chunk)
    spec = ParameterSpec(Init("normal", 0.5), name=weight)
    if weight == _TIED:
        spec = replace(spec, tie="tied", partial_over="tie", counted=stage == 0)
    return {"weight": spec, "bias": ParameterSpec(Init("zeros"), name=bias)}


def _shapes(sizes: Sizes) -> dict[str, Shape]:
    """The shapes of the logical tensors of all stages, by name."""
    chunks = []
    for stage in range(sizes.pipeline):
        for index in range(_CHUNKS):
            chunks.append(SmallChunk(torch.float32, torch.device("meta")))
            chunks[-1].parameter_specs = _specs(sizes, stage, index)
    return shapes_of(map(describe_parameters, chunks))
