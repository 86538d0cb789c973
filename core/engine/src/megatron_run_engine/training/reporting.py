"""Who watches the run: observers live on rank 0 and are told once what is about to happen."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, get_args

import torch

from megatron_run.contracts import RunSummary
from megatron_run.contracts.topology import Replicas
from megatron_run.pipeline.timeline import timeline
from megatron_run.planning.batch_size import BatchSizes
from megatron_run.planning.describe import describe
from megatron_run.planning.run import to_yaml
from megatron_run_engine.runtime.parameters import count_parameters
from megatron_run_engine.training.observing import Observers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_run.contracts import Observer
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.training.build import Assembly


def start_observers(
    run: ResolvedRun, assembly: Assembly, validation: Sequence[int], folder: RunFolder, first_step: int
) -> Observers:
    """Make the observers and tell them of the start, at ``first_step``; on ranks above 0 there are none. Collective.

    ``validation`` are the samples on which the model is evaluated.
    """
    parameters = model_parameters(assembly)
    if assembly.context.topology.rank:
        return Observers([], assembly.context.log)
    made = [(plugin.name, cast("Observer", plugin.create())) for plugin in run.plugins["observer"]]
    observers = Observers(made, assembly.context.log)
    observers.on_train_start(summarise(run, assembly, validation, folder, parameters, first_step))
    return observers


def model_parameters(assembly: Assembly) -> int:
    """Number of parameters of the whole model, each counted once. Collective over the world."""
    topology = assembly.context.topology
    firsts = {axis: topology.peers(axis)[0] for axis in get_args(Replicas)}  # of each parameter's replicas one counts
    mine = (info for each in assembly.infos for info in each.values() if firsts[info.replicas] == topology.rank)
    count = torch.tensor([0 if topology.tensor_rank else count_parameters(mine)], device=assembly.context.device)
    return int(assembly.context.groups.sum_(count, "world").item())


def summarise(
    run: ResolvedRun,
    assembly: Assembly,
    validation: Sequence[int],
    folder: RunFolder,
    parameters: int,
    first_step: int,
) -> RunSummary:
    """What observers are told at the start."""
    train = run.config.train
    return RunSummary(
        folder=folder.path,
        attempt=folder.attempt,
        first_step=first_step,
        steps=BatchSizes(train, run.sizes.data).steps(),
        parameters=parameters,
        world_size=run.sizes.world,
        config=to_yaml(run),
        plan=describe(run),
        timeline=timeline(run.plans[max(run.plans)]),
        baselines=assembly.data.baselines(train.sequence_length, train.seed, validation),
    )
