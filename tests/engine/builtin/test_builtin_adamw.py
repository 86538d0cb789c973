from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_run.contracts import ChunkOut, Init, Optimizer, ParamInfo
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.builtin.optimizer.adamw import megatron_run_create_optimizer
from megatron_run_engine.optim import UpdateOptions
from megatron_run_engine.runtime.comm import Groups, create_groups
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_testing.build_contexts import single_process_context
from tests.support.ranks import run_ranks


class Parts(nn.Module):
    """Parameters without a forward: what the optimizer sees of a chunk."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.members = nn.ParameterList(nn.Parameter(torch.ones(size)) for size in sizes)

    def forward(self, x: object, microbatch: object) -> ChunkOut:
        raise AssertionError("an optimizer runs no chunk")

    def segments(self) -> tuple[()]:
        return ()


def attached(groups: Groups, topology: Topology, *sizes: int, **info: object) -> tuple[Optimizer, list[nn.Parameter]]:
    chunk = Parts(*sizes)
    parameters = list(chunk.members)
    infos = {p: ParamInfo(f"p{i}", (), Init("ones"), decay=True, **info) for i, p in enumerate(parameters)}  # type: ignore[arg-type]
    context = replace(single_process_context(dtype=torch.float32), groups=groups, topology=topology)
    optimizer = megatron_run_create_optimizer(context, UpdateOptions())
    optimizer.attach([chunk], [infos], grad_scale=1 / topology.sizes.data)
    optimizer.zero_grad()
    return optimizer, parameters


def noting(traffic: list[int], collective: Callable[..., Any]) -> Callable[..., Any]:
    """``collective``, which notes how many values it is given."""

    def noted(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        traffic.append(tensor.numel())
        return collective(tensor, *arguments, **named)

    return noted


def data_parallel(rank: int, world: int) -> dict[str, object]:
    topology = Topology(Sizes(data=world), rank)
    groups = create_groups(topology, timedelta(seconds=20))
    big = 2**22  # fills a bucket, so that there are two
    optimizer, (last, first) = attached(groups, topology, 8, big)
    main_grad(first).fill_(float(rank))
    main_grad(last).fill_(10.0 * (rank + 1))
    traffic: list[int] = []
    with mock.patch("torch.distributed.all_reduce", noting(traffic, dist.all_reduce)):
        optimizer.grad_ready(last)  # lies in the second bucket: it may not leave before the first
        early = list(traffic)
        optimizer.grad_ready(first)
        then = list(traffic)
        optimizer.finish_grad_sync()
    means = main_grad(first)[0].item(), main_grad(last)[0].item()
    norm = optimizer.clip_(0.0).item()
    main_grad(last)[3] = math.inf if rank == 1 else 0.0
    return {"early": early, "then": then, "means": means, "norm": norm, "inf": optimizer.unscale_(torch.ones(1)).item()}


@pytest.mark.multiproc
def test_data_parallel_ranks_average_in_a_fixed_sequence_and_agree_on_norm_and_overflow() -> None:
    for seen in run_ranks(data_parallel, 2):
        assert seen["early"] == []
        assert seen["then"] == [2**22, 128]  # the smaller bucket is padded to two shares
        assert seen["means"] == (0.5, 15.0)
        assert seen["norm"] == pytest.approx(math.sqrt(2**22 * 0.25 + 8 * 225), rel=1e-6)
        assert seen["inf"] > 0


def tied_over_stages(rank: int, world: int) -> tuple[list[float], float]:
    topology = Topology(Sizes(pipeline=world), rank)
    groups = create_groups(topology, timedelta(seconds=20))
    counted = rank == 0
    optimizer, (tied,) = attached(groups, topology, 4, tie="embedding", partial_over="tie", counted=counted)
    main_grad(tied).fill_(rank + 1.0)
    optimizer.start_grad_sync(0)
    optimizer.finish_grad_sync()
    return main_grad(tied).tolist(), optimizer.clip_(0.0).item()


@pytest.mark.multiproc
def test_tied_copies_are_summed_over_their_stages_and_counted_once() -> None:
    assert run_ranks(tied_over_stages, 2) == [([3.0] * 4, 6.0), ([3.0] * 4, 6.0)]
