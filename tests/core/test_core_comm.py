from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron_run.comm import Groups, create_groups
from megatron_run.topology import Sizes, Topology
from tests.support.ranks import run_ranks


def test_collectives_of_a_world_of_one_change_nothing() -> None:
    groups, tensor = Groups(), torch.tensor([3.0])
    assert groups.sum_(tensor, "world") is tensor
    assert groups.max_(tensor, "data").item() == 3.0
    assert groups.start_sum(tensor, "data") is None
    assert groups.broadcast_(tensor, 0, "pipeline").item() == 3.0


def sums(rank: int, world: int) -> dict[str, Any]:
    topology = Topology(Sizes(data=2, pipeline=2), rank)
    groups = create_groups(topology, timedelta(seconds=20))
    scopes = ("tensor", "data", "pipeline", "tie", "world")
    found = {scope: groups.sum_(torch.tensor([10.0**rank]), scope).item() for scope in scopes}  # type: ignore[arg-type]
    return {**found, "channels": groups.channels is not None, "max": groups.max_(torch.tensor([rank]), "data").item()}


@pytest.mark.multiproc
def test_each_axis_reduces_over_its_own_ranks() -> None:
    assert run_ranks(sums, 4) == [
        {"tensor": 1, "data": 11, "pipeline": 101, "tie": 101, "world": 1111, "channels": True, "max": 1},
        {"tensor": 10, "data": 11, "pipeline": 1010, "tie": 1010, "world": 1111, "channels": True, "max": 1},
        {"tensor": 100, "data": 1100, "pipeline": 101, "tie": 101, "world": 1111, "channels": True, "max": 3},
        {"tensor": 1000, "data": 1100, "pipeline": 1010, "tie": 1010, "world": 1111, "channels": True, "max": 3},
    ]
