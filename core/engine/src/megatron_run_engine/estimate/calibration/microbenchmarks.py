"""Times products, sweeps over memory and attention in one thread, and what ranks say to each other.

Operators are timed forward and backward where they have both. Seconds are a processor's, the least of several rounds:
what else runs on the machine then takes turns, but no time. Ranks are timed over the groups of a run: sums over some of
them, and messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.runtime.comm import create_groups

#: Seconds that the calls of one round take together, at least, and rounds.
_ROUND, _ROUNDS = 0.015, 4
#: Exchanges of a round, and rounds, of which the median counts: ranks that wait are woken late now and then.
_CALLS, _EXCHANGES = 8, 5


def least_seconds(call: Callable[[], object]) -> float:
    """Processor seconds of ``call``, the least of a few rounds of several calls each."""
    call()
    count, spent = 1, _spent(call, 1)
    while spent < _ROUND:
        count = max(2 * count, int(count * _ROUND / max(spent, 1e-6)))
        spent = _spent(call, count)
    return min(spent, *(_spent(call, count) for _ in range(_ROUNDS - 1))) / count


def _spent(call: Callable[[], object], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return time.process_time() - start


def time_products(shapes: Sequence[Sequence[int]], dtype: str) -> list[float]:
    """Seconds of (rows x depth) @ (depth x columns) for each (rows, columns, depth)."""
    found = []
    for rows, columns, depth in shapes:
        left = torch.ones(rows, depth, dtype=getattr(torch, dtype))
        right = torch.ones(columns, depth, dtype=getattr(torch, dtype)).t()  # as a linear layer's weight lies
        result = torch.empty(rows, columns, dtype=getattr(torch, dtype))
        found.append(least_seconds(lambda: torch.mm(left, right, out=result)))  # noqa: B023  # called at once
    return found


def time_sweeps(sizes: Sequence[int]) -> list[float]:
    """Seconds in which an elementwise kernel reads and writes ``size`` bytes in all, for each of ``sizes``."""
    found = []
    for size in sizes:
        value = torch.ones(size // 8)
        result = torch.empty_like(value)
        found.append(least_seconds(lambda: torch.mul(value, 2.0, out=result)))  # noqa: B023  # called at once
    return found


def time_attention(shapes: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """Seconds of causal attention, forward and backward, for each (micro batch, heads, sequence, head size)."""
    found = []
    for shape in shapes:
        q, k, v = (torch.full(tuple(shape), 0.1, requires_grad=True) for _ in range(3))

        def both(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
            scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        with torch.no_grad():
            forward = least_seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))  # noqa: B023
        found.append((forward, least_seconds(both) - forward))
    return found


def time_together(active: int, seconds: float) -> float:
    """Wall seconds of a fixed piece of work, a layer's mixture, while ``active`` ranks of the world do it at once."""
    x = torch.full((256, 256), 0.1, requires_grad=True)
    block = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)

    def work() -> None:
        block(x.view(2, 128, 256)).sum().backward()

    least, takes_part = float("inf"), dist.get_rank() < active
    for _ in range(2):
        dist.barrier()
        if not takes_part:
            continue
        started = time.perf_counter()
        count = 0
        while time.perf_counter() - started < seconds:
            work()
            count += 1
        least = min(least, (time.perf_counter() - started) / max(1, count))
    return least if takes_part else 0.0


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
    for _ in range(_EXCHANGES):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        rounds.append((time.perf_counter() - start) / _CALLS)
    return median(rounds)
