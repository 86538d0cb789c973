"""Clocks of several hosts: read when the device is done, and aligned by barriers.

Nobody leaves a barrier before everybody has entered it. With ``offset`` as what has to be added to a rank's clock to
read rank 0's, each round of barriers bounds it from both sides::

    max(entered_0 - left)  <=  offset  <=  min(left_0 - entered)

The midpoint is off by at most half the width. This is Cristian's method, "Probabilistic clock synchronization" (1989),
with a barrier in the place of a request and its answer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron_run_engine.runtime.comm import Groups, Scope

#: Barriers to align clocks by. The tightest counts, so it takes a few for one in which nobody was held up.
ROUNDS = 10


class Offset(NamedTuple):
    """What to add to a clock to read rank 0's, and by how much that may be wrong at most; seconds."""

    seconds: float
    error: float


def device_clock(device: torch.device) -> Callable[[], float]:
    """The host's clock in seconds; on a GPU, once the work that the caller has launched is done.

    Only the caller's stream is waited for: messages in flight and gradient reductions go on.
    """
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    return read


def barrier_rounds(groups: Groups, scope: Scope, device: torch.device, rounds: int = ROUNDS) -> list[list[float]]:
    """This rank's (entered, left) of each barrier over ``scope``, by the host's clock. Collective over ``scope``."""
    times = []
    token = torch.ones(1, device=device)
    for _ in range(rounds):
        entered = time.perf_counter()
        groups.max_(token, scope).item()  # no rank has the maximum before every rank gave its number
        times.append([entered, time.perf_counter()])
    return times


def clock_offset(first: Sequence[Sequence[float]], rank: Sequence[Sequence[float]]) -> Offset:
    """The offset of a rank's clock to rank 0's from the (entered, left) of both in the same barriers."""
    low = max(entered - left for (entered, _), (_, left) in zip(first, rank, strict=True))
    high = min(left - entered for (_, left), (entered, _) in zip(first, rank, strict=True))
    return Offset((low + high) / 2, (high - low) / 2)
