"""The conformance suite of kind ``optimizer``: promises for every update rule, on one rank and on several.

The suite starts the ranks itself, as processes on this machine that communicate over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch

from megatron_run.contracts import Optimizer
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.runtime.comm import Groups, create_groups
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing import Check
from megatron_run_testing.build_contexts import context_at
from megatron_run_testing.optimizer import alone, grid, together
from megatron_run_testing.optimizer.bench import Bench, OptimizerFactory
from megatron_run_testing.ranks import Rehearsal, SendablePlugin

__all__ = ["Bench", "OptimizerFactory", "PluginOptimizer", "optimizer_checks"]

#: Seconds for all trials with one number of ranks.
_TIMEOUT = 60.0

#: Promises for one rank, by name of the check.
_ALONE: Mapping[str, Callable[[OptimizerFactory], None]] = MappingProxyType(
    {
        "main_grad keeps its storage and is cleared by zero_grad": alone.check_storage,
        "gradients are multiplied by grad_scale once": alone.check_grad_scale,
        "start_grad_sync is idempotent": alone.check_idempotent,
        "unscale_ multiplies and finds non-finite values": alone.check_unscale,
        "clip_ returns the norm and clips to it": alone.check_clip,
        "count_zeros counts every zero and no padding": alone.check_zeros,
        "step moves against the gradient": alone.check_descent,
        "weight decay shrinks matrices and leaves biases": alone.check_decay,
        "each step takes its own lr and weight decay": alone.check_rates,
        "small updates of 16-bit parameters are not lost": alone.check_small_updates,
        "memory reports bytes by role, planned and real": alone.check_memory,
        "a new optimizer continues from saved state bit for bit": alone.check_round_trip,
        "load_weights starts as before the first step": alone.check_weights_alone,
        "a stage without parameters works": alone.check_nothing,
    }
)


@dataclass(frozen=True)
class _Trial:
    """``run`` is called on every rank, ``judge`` with the results of all ranks.

    The ranks are data-parallel, or with ``stages`` two stages of a pipeline, each on half of the ranks.
    """

    run: Callable[[OptimizerFactory, BuildContext], Any]
    judge: Callable[[OptimizerFactory, Sequence[Any]], None]
    stages: bool = False

    def sizes(self, world: int) -> Sizes:
        """The grid of ``world`` ranks; a single rank is one stage."""
        return Sizes(data=world // 2, pipeline=2) if self.stages and world > 1 else Sizes(data=world)


#: Promises for several ranks, by name of the check. Those on stages come last: their groups are made last.
_TOGETHER: Mapping[str, _Trial] = MappingProxyType(
    {
        "data-parallel ranks hold equal parameters": _Trial(together.run_steps, together.judge_replicas),
        "they train as one rank does with the mean gradient": _Trial(together.run_steps, together.judge_mean),
        "norm and zeros count every value once": _Trial(together.run_steps, together.judge_numbers),
        "an overflow on one rank is reported on all": _Trial(together.find_overflows, together.judge_overflows),
        "the state of all ranks holds every value once": _Trial(together.run_steps, together.judge_state),
        "so does that of parameters in bf16, unrounded": _Trial(together.run_rounded_steps, together.judge_state),
        "gradients of two chunks leave when they are complete": _Trial(grid.train_chunks, grid.judge_chunks),
        "stages sum and count what they share once": _Trial(grid.train_stages, grid.judge_chunks, stages=True),
        "an overflow on one stage is reported on all": _Trial(
            together.find_overflows_of_stages, together.judge_overflows, stages=True
        ),
    }
)


def optimizer_checks(create: OptimizerFactory, *, ranks: Sequence[int] = (1,)) -> tuple[Check, ...]:
    """The checks of an optimizer; ``create`` makes a new one from a context.

    ``ranks`` are the data-parallel sizes to try, powers of two. For sizes above 1 ``create`` must be importable: a
    function of a module, or a :class:`PluginOptimizer`.
    """
    bench = _Ranks(create, tuple(ranks))
    return (
        *(Check(name, partial(check, create)) for name, check in _ALONE.items()),
        *(Check(name, partial(bench.check, trial)) for name, trial in _TOGETHER.items()),
    )


class PluginOptimizer(SendablePlugin):
    """Creates the optimizer of a plugin; it can be sent to another process."""

    def __call__(self, context: BuildContext) -> Optimizer:
        """The optimizer of one rank."""
        optimizer: Optimizer = self.plugin.create(context=context)
        return optimizer


@dataclass
class _Ranks:
    create: OptimizerFactory
    ranks: tuple[int, ...]

    def check(self, trial: _Trial) -> None:
        """Judge ``trial`` with every number of ranks."""
        for size in self.ranks:
            where = f"on {size} ranks"
            found = self._on_ranks.found(size, trial.run.__name__, where) if size > 1 else [self._alone(trial)]
            try:
                trial.judge(self.create, found)
            except AssertionError as failure:
                raise type(failure)(f"{where}: {failure}") from None

    def _alone(self, trial: _Trial) -> Any:
        return trial.run(self.create, _context(Topology(Sizes(), 0), Groups()))

    @cached_property
    def _on_ranks(self) -> Rehearsal[str]:
        return Rehearsal(_try_on_rank, (self.create,), list(_runs()), _TIMEOUT, PluginOptimizer.__name__)


def _try_on_rank(rank: int, world: int, create: OptimizerFactory, names: Sequence[str]) -> Iterator[Any]:
    """Run the trials ``names`` on one of ``world`` ranks."""
    made: dict[Sizes, BuildContext] = {}
    for trial in (_runs()[name] for name in names):
        topology = Topology(trial.sizes(world), rank)
        if topology.sizes not in made:
            made[topology.sizes] = _context(topology, create_groups(topology, timedelta(seconds=_TIMEOUT)))
        yield trial.run(create, made[topology.sizes])


def _runs() -> dict[str, _Trial]:
    return {trial.run.__name__: trial for trial in _TOGETHER.values()}


def _context(topology: Topology, groups: Groups) -> BuildContext:
    return context_at(topology, groups, dtype=torch.float32)
