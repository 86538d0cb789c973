"""The conformance suite of kind ``parallel-layer``: every layer against the dense one, on one rank and on several.

The suite starts the ranks itself, as processes on this machine that communicate over gloo. Reading order: ``member``
(the part of a tensor that a rank holds), ``cases`` and ``attention`` (every layer with its inputs and its oracle),
``trial`` (a layer against its oracle), ``promises`` (other properties of a factory), ``pieces`` (attention of
samples that ranks split).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_run.contracts import ParallelLayers
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.comm import create_groups
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing import Check, CheckFailed
from megatron_run_testing.build_contexts import current_device
from megatron_run_testing.parallel_layer.attention import attentions
from megatron_run_testing.parallel_layer.cases import cases
from megatron_run_testing.parallel_layer.member import CreateLayers, Member, Rank
from megatron_run_testing.parallel_layer.pieces import piece_checks
from megatron_run_testing.parallel_layer.promises import rules
from megatron_run_testing.parallel_layer.trial import LayerTrial, Trial
from megatron_run_testing.ranks import Rehearsal, SendablePlugin

if TYPE_CHECKING:
    from megatron_run.registry.discover import Entry

#: Seconds for all trials with one number of ranks.
_TIMEOUT = 90.0
#: (whether the sequence is split, name of the trial); one set of ranks runs the jobs one after the other.
_Job = tuple[bool, str]


def parallel_layer_checks(
    create: CreateLayers,
    *,
    ranks: Sequence[int] = (1,),
    sequence: bool = True,
    context: Sequence[int] = (),
    dtype: torch.dtype = torch.float64,
    device: str | torch.device | None = None,
    tolerance: float = 1e-10,
) -> tuple[Check, ...]:
    """The checks that every factory of layers must pass; ``ranks`` are the tensor-parallel sizes to try.

    ``context`` are the context-parallel sizes, for a factory whose attention sees the pieces of all ranks.

    With each number of ranks, and with ``sequence`` also under sequence parallelism, every rank's outputs, initial
    values, input gradients and weight gradients must equal the same parts of the dense layers' within ``tolerance``,
    relative and absolute; choose a larger one for a ``dtype`` below float64. What a factory may lack is tried where it
    has it: variants of attention, packed documents, keys of earlier tokens, norms times 1 + weight, the loss in chunks.
    For sizes above 1 ``create`` must be importable: a function of a module, or a :class:`PluginLayers`. Several ranks
    run on the CPU, a single one on ``device``, by default that of
    :func:`~megatron_run_testing.build_contexts.on_device`.
    """
    here = current_device() if device is None else torch.device(device)
    bench = _Bench(create, dtype, here, tuple(ranks), sequence, tolerance)
    checks = tuple(Check(trial.name, partial(bench.check, trial)) for trial in bench.trials.values())
    return (*checks, *piece_checks(create, context, dtype, tolerance))


class PluginLayers(SendablePlugin):
    """Creates the layers of a plugin, stacked on ``below`` or the dense ones; it can be sent to another process."""

    def __init__(self, entry: Entry, options: Mapping[str, Any], below: PluginLayers | None = None) -> None:
        super().__init__(entry, options)
        self.below = below

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.entry, self.options, self.below)

    def __call__(self, context: BuildContext) -> ParallelLayers:
        """The factory of one rank."""
        base = DenseLayers(context) if self.below is None else self.below(context)
        layers: ParallelLayers = self.plugin.create(context=context, base=base)
        return layers


@dataclass
class _Bench:
    create: CreateLayers
    dtype: torch.dtype
    device: torch.device
    ranks: tuple[int, ...]
    sequence: bool
    tolerance: float

    @cached_property
    def trials(self) -> dict[str, Trial]:
        """All trials by name, in the order in which they run."""
        return all_trials(self.dtype, self.device)

    def check(self, trial: Trial) -> str:
        """Judge ``trial`` with every number of ranks, without and with sequence parallelism.

        Returns the reason if there was nothing to try on any.
        """
        reasons = []
        for size in self.ranks:
            for sequence in (False, True) if self.sequence and size > 1 else (False,):
                try:
                    reasons.append(trial.judge(self._found(size, (sequence, trial.name)), self.tolerance) or "")
                except CheckFailed as failure:
                    raise CheckFailed(f"{trial.name}: {failure}") from None
        return reasons[0] if all(reasons) else ""

    def _found(self, size: int, job: _Job) -> dict[Member, Any]:
        """The results of ``job`` on each of ``size`` ranks."""
        if size == 1:
            rank = Rank.alone(self.create, self.dtype, self.device)
            return {rank.member: self.trials[job[1]].run(rank)}
        where = f"on {size} ranks{', sequence split' * job[0]}"
        return dict(self._on_ranks.found(size, job, where))

    @cached_property
    def _on_ranks(self) -> Rehearsal[_Job]:
        jobs = [(sequence, name) for name in self.trials for sequence in (False, True)[: 1 + self.sequence]]
        return Rehearsal(_try_on_rank, (self.create, self.dtype), jobs, _TIMEOUT, PluginLayers.__name__)


def all_trials(dtype: torch.dtype, device: torch.device) -> dict[str, Trial]:
    """Every trial by name, the same in every process."""
    trials: list[Trial] = [*(LayerTrial(case, dtype, device) for case in (*cases(), *attentions())), *rules()]
    return {trial.name: trial for trial in trials}


def _try_on_rank(
    rank: int, world: int, create: CreateLayers, dtype: torch.dtype, jobs: Sequence[_Job]
) -> Iterator[tuple[Member, Any]]:
    """Run the trials of ``jobs`` on one of ``world`` tensor-parallel ranks."""
    topology, device = Topology(Sizes(tensor=world), rank), torch.device("cpu")
    groups, trials = create_groups(topology, timedelta(seconds=_TIMEOUT)), all_trials(dtype, device)
    for sequence, name in jobs:
        here = Rank(create, dtype, device, topology, groups, sequence)
        yield here.member, trials[name].run(here)
