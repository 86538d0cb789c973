"""Which device a rank computes on."""

from __future__ import annotations

from typing import Literal

from megatron_run.errors import InputError
from megatron_run.world import World


def choose_device(setting: Literal["auto", "cpu", "cuda"], world: World, gpus: int) -> str:
    """``cuda:N`` or ``cpu``. ``gpus`` is how many this host has; ``auto`` takes them when every local rank gets one.

    Raises :class:`InputError` when ``cuda`` is asked for and there are too few.
    """
    if setting == "cpu" or (setting == "auto" and gpus < world.local_size):
        return "cpu"
    if gpus < world.local_size:
        raise InputError(
            f"run.device=cuda needs {world.local_size} GPU{'s' if world.local_size > 1 else ''} on {world.host}",
            why=f"{gpus} found",
            fix="set run.device=cpu or start fewer local ranks",
        )
    return f"cuda:{world.local_rank}"


def explain_device(setting: Literal["auto", "cpu", "cuda"], world: World, gpus: int) -> str:
    """What to tell the user about the choice; empty when there was nothing to choose."""
    if setting != "auto" or not 0 < gpus < world.local_size:
        return ""
    return f"training on the CPU: {world.local_size} local ranks, {gpus} GPU{'s' if gpus > 1 else ''}"
