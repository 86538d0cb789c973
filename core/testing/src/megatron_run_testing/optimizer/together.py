"""Promises of every optimizer on several data-parallel ranks: they train as one rank does with the mean gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_run.contracts import Optimizer, StatePiece
from megatron_run_engine.runtime.context import BuildContext, Dtypes
from megatron_run_testing import CheckFailed
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.optimizer.alone import expect, expect_same, shapes
from megatron_run_testing.optimizer.bench import Bench, OptimizerFactory, SavedState, gradients, mean_gradients

#: Steps of the trial; the state is taken before the last one.
STEPS = 4
#: Below the norm of most steps' gradients, so that clipping takes effect.
MAX_NORM = 5.0


class Run(NamedTuple):
    """One rank's results: per step, numbers (found_inf, norm, zeros) and parameters by name.

    ``pieces`` is its state before the last step. ``loaded`` are the parameters of a new optimizer that loaded the state
    of all ranks, before and after that step.
    """

    numbers: list[Tensor]
    values: list[dict[str, Tensor]]
    pieces: list[StatePiece]
    loaded: list[dict[str, Tensor]]


def run_steps(factory: OptimizerFactory, context: BuildContext) -> Run:
    """Train with this rank's gradients, then repeat the last step from the state of all ranks."""
    rank, ranks = context.topology.data_rank, context.topology.sizes.data
    bench = Bench(factory, context)
    run = Run([], [], [], [])
    for step in range(STEPS):
        if step == STEPS - 1:
            run.pieces.extend(saved_pieces(bench.optimizer))
        run.numbers.append(bench.step(gradients(step, rank), max_norm=MAX_NORM))
        run.values.append(bench.values())
    fresh = Bench(factory, context)
    fresh.optimizer.load_state(SavedState(of_all(run.pieces, ranks), shapes(fresh)))
    run.loaded.append(fresh.values())
    fresh.step(gradients(STEPS - 1, rank), max_norm=MAX_NORM)
    run.loaded.append(fresh.values())
    return run


def run_rounded_steps(factory: OptimizerFactory, context: BuildContext) -> Run:
    """As :func:`run_steps`, with parameters in bf16 that are rounded from masters in fp32."""
    return run_steps(factory, replace(context, dtypes=Dtypes(param=torch.bfloat16, main=torch.float32)))


def saved_pieces(optimizer: Optimizer) -> list[StatePiece]:
    """A copy of this rank's state, as a save would write it."""
    return [piece._replace(tensor=piece.tensor.detach().clone()) for piece in optimizer.iter_state()]


def of_all(pieces: list[StatePiece], ranks: int) -> list[StatePiece]:
    """The pieces of all ``ranks``. Collective."""
    if ranks == 1:
        return pieces
    gathered: list[list[StatePiece]] = [[] for _ in range(ranks)]
    dist.all_gather_object(gathered, pieces)
    return [piece for some in gathered for piece in some]


def find_overflows(factory: OptimizerFactory, context: BuildContext) -> list[float]:
    """found_inf of steps in which each rank in turn has a non-finite value, and of a step after them."""
    rank, ranks = context.topology.rank, context.topology.sizes.world
    bench = Bench(factory, context)
    found = []
    for planted in range(ranks + 1):
        weight, bias = gradients(planted, rank)
        if rank == planted:
            weight[planted, -1] = (torch.inf, torch.nan)[planted % 2]
        bench.reduce(weight, bias)
        found.append(bench.optimizer.unscale_(bench.one).item())
    return found


def find_overflows_of_stages(factory: OptimizerFactory, context: BuildContext) -> list[float]:
    """As :func:`find_overflows`, for a grid with stages."""
    return find_overflows(factory, context)


def judge_replicas(_: OptimizerFactory, runs: Sequence[Run]) -> None:
    """All ranks hold the same parameters after every step."""
    for step, first in enumerate(runs[0].values):
        for rank, run in enumerate(runs):
            expect_same(f"step {step}, rank {rank} against rank 0", run.values[step], first)


def judge_mean(factory: OptimizerFactory, runs: Sequence[Run]) -> None:
    """The parameters equal those of one rank with the mean gradient."""
    alone = Bench(factory)
    for step, values in enumerate(runs[0].values):
        alone.step(mean_gradients(step, len(runs)), max_norm=MAX_NORM)
        for name, expected in alone.values().items():
            expect(f"step {step}: {name}", values[name], expected)


def judge_numbers(_: OptimizerFactory, runs: Sequence[Run]) -> None:
    """Norm and zeros count every value of the mean gradient once, on every rank."""
    for step in range(STEPS):
        mean = torch.cat([gradient.flatten() for gradient in mean_gradients(step, len(runs))])
        for rank, run in enumerate(runs):
            expect(f"step {step}, rank {rank}: the norm", run.numbers[step][1], float(mean.norm()))
            expect(f"step {step}, rank {rank}: the zeros", run.numbers[step][2], float((mean == 0).sum()))


def judge_overflows(_: OptimizerFactory, found: Sequence[list[float]]) -> None:
    """An overflow on one rank is reported on all, and not in the step after."""
    for rank, values in enumerate(found):
        *planted, clean = values
        for where, value in enumerate(planted):
            if not value > 0:
                raise CheckFailed(
                    f"a gradient of rank {where} is not finite, and found_inf of rank {rank} is {value:g}"
                )
        if clean:
            raise CheckFailed(f"found_inf of rank {rank} is {clean:g} in a step after overflows, expected 0")


def judge_state(factory: OptimizerFactory, runs: Sequence[Run]) -> None:
    """The ranks' state contains every value once, and new optimizers continue from it bit for bit."""
    alone = Bench(factory, single_process_context(dtype=runs[0].values[0]["weight"].dtype))
    saved = SavedState((piece for run in runs for piece in run.pieces), shapes(alone))
    for rank, run in enumerate(runs):
        expect_same(f"rank {rank} after its state was loaded", run.loaded[0], run.values[-2])
        expect_same(f"rank {rank} a step after its state was loaded", run.loaded[1], run.values[-1])
    alone.optimizer.load_state(saved)
    expect_same("one rank that loaded the state", alone.values(), runs[0].values[-2])
