"""Which device a rank computes on. Pure."""

from __future__ import annotations

from typing import Literal

from megatron_run.errors import InputError
from megatron_run_engine.runtime.world import World

Setting = Literal["auto", "cpu", "cuda"]


def choose_device(setting: Setting, world: World, gpus: int) -> str:
    """``cuda:N`` or ``cpu``. ``gpus`` is how many this rank sees; ``auto`` takes them when every local rank gets one.

    A rank of another launcher that sees exactly one takes it: ``srun --gpus-per-task=1`` shows each task only its own.
    Raises :class:`InputError` when there are too few for ``cuda``, or for ``auto`` where another launcher has already
    started a rank for each GPU that it was asked for. Without any GPU ``auto`` is the CPU.
    """
    if setting == "cpu" or (setting == "auto" and gpus == 0):
        return "cpu"
    if gpus >= world.local_size:
        return f"cuda:{world.local_rank}"
    if gpus == 1 and _joined(world):
        return "cuda:0"
    if setting == "auto" and not _joined(world):
        return "cpu"
    raise InputError(
        f"run.device={setting} needs {world.local_size} GPU{'s' if world.local_size > 1 else ''} on {world.host}",
        why=f"{gpus} found",
        fix="set run.device=cpu or start fewer local ranks",
    )


def explain_device(setting: Setting, world: World, gpus: int) -> str:
    """What to tell the user when the CPU is used for want of GPUs; empty when there was nothing to choose."""
    if setting != "auto" or choose_device(setting, world, gpus) != "cpu":
        return ""
    if gpus:
        return f"training on the CPU: {world.local_size} local ranks, {gpus} GPU{'s' if gpus > 1 else ''}"
    return f"training on the CPU: no GPU on {world.host}" if _joined(world) else ""


def deterministic_environment(wanted: bool | None, device: str) -> dict[str, str]:
    """Variables that must be set before CUDA starts when deterministic kernels are ``wanted`` on ``device``.

    Without a workspace of fixed size cuBLAS may choose another algorithm in the next run, and PyTorch refuses to go
    on; None does not ask for deterministic kernels on a GPU.
    """
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if wanted and device != "cpu" else {}


def _joined(world: World) -> bool:
    """Whether another launcher started the ranks."""
    return world.launcher in ("torchrun", "slurm")
