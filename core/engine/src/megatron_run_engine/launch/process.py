"""What a rank sets in its process, and how a program that trains inside its own gets that back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch.utils import deterministic as kernels

from megatron_run.errors import RunError
from megatron_run_engine.launch.device import choose_device, deterministic_environment, explain_device
from megatron_run_engine.launch.threads import threads_per_rank
from megatron_run_engine.runtime.world import World

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun

#: Variables that training may set.
_CUBLAS = frozenset(deterministic_environment(True, "cuda"))


def check_local_devices(run: ResolvedRun) -> None:
    """Raise what :func:`assign_device` would on the ranks that are about to be started here, the lowest one's first.

    Nothing is allocated on a GPU: the launcher holds none.
    """
    gpus, size = torch.cuda.device_count(), run.sizes.world
    worlds = (World(rank, size, rank, size, launcher="local") for rank in range(size))
    for device in dict.fromkeys(choose_device(run.config.run.device, world, gpus) for world in worlds):
        _check_plugins(run, device)


def why_not_here(run: ResolvedRun) -> str:
    """What keeps local ranks of ``run`` from being started on this machine, in one line; empty where nothing does."""
    try:
        check_local_devices(run)
    except RunError as error:
        return str(error)
    return ""


def assign_device(run: ResolvedRun, world: World) -> World:
    """``world`` with its device chosen; rank 0 says so when it trains on the CPU for want of GPUs.

    Raises :class:`megatron_run.errors.RunError` when there is no such device, or a chosen plugin cannot run on it.
    """
    gpus = torch.cuda.device_count()
    device = choose_device(run.config.run.device, world, gpus)
    notice = explain_device(run.config.run.device, world, gpus)
    if notice and world.rank == 0:
        print(notice, flush=True)  # noqa: T201  # standard output of rank 0 is what the terminal shows
    _check_plugins(run, device)
    return replace(world, device=device)


def start_device(run: ResolvedRun, device: str) -> None:
    """Make ``device`` current, which starts CUDA."""
    _tell_cublas(run, device)
    if device != "cpu":
        torch.cuda.set_device(torch.device(device))


def gpu_name(device: str) -> str:
    """What tells the GPU behind ``device`` from every other, on any host; empty for the CPU."""
    return "" if device == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def set_threads(run: ResolvedRun, world: World) -> None:
    """Threads of this rank's CPU work. In a Python program ``auto`` leaves what the program chose."""
    setting = run.config.run.threads
    if world.launcher != "python" or setting != "auto":
        torch.set_num_threads(threads_per_rank(setting, world.local_size))


@contextmanager
def borrowed_process(run: ResolvedRun, world: World) -> Iterator[None]:
    """Device and threads for ``run`` in a process that is somebody else's, which afterwards is what it was.

    Given back are the default generators, the choice of deterministic kernels, threads, the current GPU and cuBLAS's
    variable.
    """
    threads, variables = torch.get_num_threads(), os.environ.keys() & _CUBLAS
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = kernels.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch hides it behind a class
    _tell_cublas(run, world.device)
    gpus = [] if world.device == "cpu" else [torch.device(world.device)]
    current = torch.cuda.current_device() if gpus else None
    try:
        with torch.random.fork_rng(gpus):
            start_device(run, world.device)
            set_threads(run, world)
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        kernels.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if current is not None:
            torch.cuda.set_device(current)
        for name in _CUBLAS - variables:
            os.environ.pop(name, None)


def _check_plugins(run: ResolvedRun, device: str) -> None:
    for plugin in chain.from_iterable(run.plugins.values()):
        plugin.check_device(device)


def _tell_cublas(run: ResolvedRun, device: str) -> None:
    """Set what cuBLAS must find in the environment when CUDA starts; what the user has set stays."""
    for name, value in deterministic_environment(run.config.run.deterministic, device).items():
        os.environ.setdefault(name, value)
