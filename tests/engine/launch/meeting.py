"""Ranks that meet at a rendezvous: threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from megatron_run_engine.launch.rendezvous import Outcome, Rendezvous, attempt
from megatron_run_engine.runtime.world import World

T = TypeVar("T")


def meet(
    place: str, size: int, work: Callable[[int, Rendezvous], T], *, timeout: float = 20.0, restart: int | None = None
) -> list[Outcome[T]]:
    """``work`` of every rank at ``place``; what each returned or raised. With ``restart`` an agent listens there."""

    def rank(number: int) -> Outcome[T]:
        serves = number == 0 and restart is None
        launcher = "python" if restart is None else "torchrun"
        world = World(
            number,
            size,
            init_method=place,
            serves_store=serves,
            restart=restart or 0,
            launcher=launcher,
            host=f"host{number}",
        )
        return attempt(lambda: work(number, Rendezvous(world, timeout)))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))
