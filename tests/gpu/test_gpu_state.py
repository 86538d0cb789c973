"""What a device holds and saves: checkpoints that cross devices, memory as planned, collectives of NCCL."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_run.config.request import Request
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.planning import resolve
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_engine.runtime.comm import Groups, ParallelGroup
from megatron_run_engine.runtime.world import World
from megatron_run_engine.training.build import build
from tests.gpu.runs import CPU, CUDA, attempt, losses
from tests.support.ranks import run_ranks
from tests.support.saved_steps import read_all, same_state

OFTEN = ("checkpoint.interval=3", "checkpoint.keep=9")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_a_run_goes_on_on_another_device(device: str, back: bool, tmp_path: Path) -> None:
    first, second = (device, "cpu") if back else ("cpu", device)
    whole = attempt(tmp_path / "whole", 1, "cpu")
    begun = attempt(tmp_path / "run", 1, first, stop_after=3)
    ended = attempt(tmp_path / "run", 2, second)
    assert (len(begun), len(ended)) == (4, 2)
    assert [*begun, *ended] == pytest.approx(whole, rel=1e-4)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_what_is_saved_behind_the_training_has_the_bits_of_what_is_saved_at_once(device: str, tmp_path: Path) -> None:
    often = (*OFTEN, "run.deterministic=true", "train.steps=10")
    at_once = losses(tmp_path / "at once", device, *often)
    assert losses(tmp_path / "behind", device, *often, "checkpoint.async_save=true") == at_once
    first, second = (Checkpoints(tmp_path / way / "checkpoints") for way in ("at once", "behind"))
    assert first.steps() == second.steps() == [3, 6, 9, 10]
    assert all(same_state(read_all(first, step), read_all(second, step)) for step in first.steps())


@pytest.mark.timeout(90)
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_holds_the_memory_that_was_planned(precision: str, device: str) -> None:
    sets = ("model.hidden_size=256", "run.threads=1", f"train.precision={precision}")
    run = resolve(Request(("preset:tiny",), sets=sets, plugins=("optimizer=zero1",)))
    planned = model_size(run).stages[0].memory
    place = "cuda:0" if device == "cuda" else "cpu"
    gc.collect()  # what other tests have left as garbage is not counted, nor freed on the way
    before = torch.cuda.memory_allocated(0) if device == "cuda" else 0
    assembly = build(run, World(device=place))
    assembly.optimizer.zero_grad()
    assembly.optimizer.finish_grad_sync()
    assembly.optimizer.step(1e-3, 0.0)
    assert dict(assembly.optimizer.memory()) == dict(planned)
    if device == "cuda":
        allocated = torch.cuda.memory_allocated(0) - before
        assert sum(planned.values()) <= allocated <= 1.05 * sum(planned.values()) + 2**20  # tables of positions, cells


def one_rank(rank: int, world: int, backend: str, store: str) -> list[list[float]]:
    """Every collective, as layers and optimizers call it, in a world of one rank that yet communicates."""
    device = torch.device("cuda:0" if backend == "nccl" else "cpu")
    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
        device_id=device if backend == "nccl" else None,
    )
    group = dist.new_group([0], timeout=timedelta(seconds=60))
    groups = Groups({"replicas": group}, None, dist.group.WORLD)

    class Alone(ParallelGroup):
        _several = True  # torch's collectives are called all the same

    peers, x = Alone(0, 1, group, "replicas"), torch.arange(4.0, device=device)
    every = [range(4)]
    found = [
        groups.sum_(x.clone(), "replicas"),
        groups.max_(x.clone(), "world"),
        groups.broadcast_(x.clone(), 0, "world"),
        peers.sum_(x.clone()),
        peers.max_(x.clone()),
        peers.gather(x),
        peers.scatter_sum(x),
        peers.exchange(x, (4,), (4,)),
        peers.start_sum_shares(x.clone(), every).wait(),
        peers.start_gather_shares(x.clone(), every).wait(),
    ]
    rows = [torch.empty_like(x)]
    groups.gather_(x, rows)
    assert groups.gather_names(["a", "b"], device) == [["a", "b"]]
    topology = Topology(Sizes(), 0)
    assert groups.parallel_group(topology, "replicas").size == 1
    return [each.tolist() for each in (*found, *rows)]


@pytest.mark.multiproc
@pytest.mark.timeout(90)
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_every_collective_works_in_a_world_of_one(backend: str, tmp_path: Path) -> None:
    (found,) = run_ranks(one_rank, 1, backend, str(tmp_path / "store"))
    assert found == [[0, 1, 2, 3]] * 11
