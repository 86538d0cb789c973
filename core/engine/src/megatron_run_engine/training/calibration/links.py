"""Times what ranks say to each other over the groups of a run: sums over some of them, and messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.runtime.comm import create_groups

#: Exchanges of a round, and rounds, of which the median counts: ranks that wait are woken late now and then.
_CALLS, _ROUNDS = 8, 5


def time_sums(sizes: Sequence[int], members: int) -> list[float]:
    """Seconds in which each ``members`` ranks of the world sum ``size`` bytes, all such groups at once."""
    topology = Topology(Sizes(tensor=members, data=dist.get_world_size() // members), dist.get_rank())
    groups = create_groups(topology, timedelta(minutes=5))
    found = []
    for size in sizes:
        value = torch.zeros(size // 4)
        found.append(_seconds(lambda: groups.sum_(value, "tensor")))  # noqa: B023  # called at once
    return found


def time_messages(sizes: Sequence[int]) -> list[float]:
    """Seconds until ``size`` bytes have reached the neighbour: half of there and back, all pairs of ranks at once."""
    rank = dist.get_rank()
    found = []
    for size in sizes:
        value = torch.zeros(size // 4)

        def there_and_back(value: torch.Tensor = value) -> None:
            if rank % 2:
                dist.recv(value, rank - 1)
                dist.send(value, rank - 1)
            else:
                dist.send(value, rank + 1)
                dist.recv(value, rank + 1)

        found.append(_seconds(there_and_back) / 2)
    return found


def _seconds(call: Callable[[], object]) -> float:
    call()
    rounds = []
    for _ in range(_ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        rounds.append((time.perf_counter() - start) / _CALLS)
    return median(rounds)
