"""Who watches the run: observers live on rank 0 and are told once what is about to happen."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any, cast, get_args

import torch

from megatron_run.contracts import RunSummary
from megatron_run.contracts.topology import Replicas
from megatron_run.pipeline.timeline import timeline
from megatron_run.planning.batch_size import BatchSizes
from megatron_run_engine.run_folder.folder import write_json
from megatron_run_engine.runtime.parameters import count_parameters
from megatron_run_engine.training.observing import Observers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_run.contracts import DevicePeak, Observer
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.training.build import Assembly


def start_observers(
    run: ResolvedRun,
    assembly: Assembly,
    validation: Sequence[int],
    folder: RunFolder,
    first_step: int,
    peak: DevicePeak | None,
) -> Observers:
    """Make the observers and tell them of the start, at ``first_step``; on ranks above 0 there are none. Collective.

    ``validation`` are the samples on which the model is evaluated, ``peak`` is that of rank 0's device.
    """
    parameters = model_parameters(assembly)
    if assembly.context.topology.rank:
        return Observers([], assembly.context.log)
    write_json(folder.records / "device.json", device_record(assembly.context.device, run.config.train.precision, peak))
    made = [(plugin.name, cast("Observer", plugin.create())) for plugin in run.plugins["observer"]]
    observers = Observers(made, assembly.context.log)
    observers.on_train_start(summarise(run, assembly, validation, folder, parameters, first_step, peak))
    return observers


def device_record(device: torch.device, precision: str, peak: DevicePeak | None) -> dict[str, Any]:
    """``device.json``: what rank 0 computes on, and of which peak its mfu is a fraction."""
    cpu = platform.processor() or platform.machine()
    return {
        "v": 1,
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "threads": torch.get_num_threads(),
        "precision": precision,
        "peak_tflops": peak and peak.tflops,
        "peak_source": peak and peak.source,
    }


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
    peak: DevicePeak | None,
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
        config=run.to_yaml(),
        plan=run.describe(),
        timeline=timeline(run.plans[max(run.plans)]),
        baselines=assembly.data.baselines(train.sequence_length, train.seed, validation),
        peak=peak,
    )
