"""The settings of a rank in its process: its device, its CPU threads, kernels and precision, and how all is given back.

torch is imported inside the functions that need it.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from megatron_run.errors import InputError
from megatron_run_engine.host.rank_environment import threads_per_rank
from megatron_run_engine.runtime.cuda_libraries import variables_kept
from megatron_run_engine.runtime.world import World

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun

Setting = Literal["auto", "cpu", "cuda"]
Backend = Literal["nccl", "gloo"]

#: A workspace of fixed size.
_CUBLAS: Mapping[str, str] = MappingProxyType({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})


def choose_device(setting: Setting, world: World, gpus: int, *, shared: bool = False) -> str:
    """``cuda:N`` or ``cpu``. ``gpus`` is how many this rank sees; ``auto`` takes them when every local rank gets one.

    A rank of another launcher that sees exactly one takes it: ``srun --gpus-per-task=1`` shows each task only its own.
    With ``shared``, ranks that asked for ``cuda`` take turns where there are fewer GPUs.
    Raises :class:`InputError` when there are too few for ``cuda``, or for ``auto`` where another launcher has already
    started a rank for each GPU that it was asked for. Without any GPU ``auto`` is the CPU.
    """
    joined = _joined(world)
    if setting == "cpu" or (setting == "auto" and gpus == 0):
        return "cpu"
    if gpus >= world.local_size:
        return f"cuda:{world.local_rank}"
    if gpus == 1 and joined:
        return "cuda:0"
    if shared and setting == "cuda" and gpus:
        return f"cuda:{world.local_rank % gpus}"
    if setting == "auto" and not joined:
        return "cpu"
    share = "run.backend=gloo to share them, or " if gpus and not shared else ""
    raise InputError(
        f"run.device={setting} needs {world.local_size} GPU{'s' if world.local_size > 1 else ''} on {world.host}",
        why=f"{gpus} found",
        fix=f"set run.device=cpu, or {share}start fewer local ranks" if gpus else "set run.device=cpu",
    )


def choose_backend(setting: Literal["auto"] | Backend, device: str) -> Backend:
    """NCCL between GPUs and gloo between CPUs, unless ``setting`` says otherwise.

    NCCL refuses two ranks on one GPU. Raises :class:`InputError` when it is asked for without GPUs.
    """
    if setting == "nccl" and device == "cpu":
        raise InputError("run.backend=nccl needs GPUs", why="this run is on cpu", fix="set run.device=cuda")
    return ("gloo" if device == "cpu" else "nccl") if setting == "auto" else setting


def explain_device(setting: Setting, world: World, gpus: int) -> str:
    """A notice for the user when the CPU is used for want of GPUs; empty when there was nothing to choose."""
    if setting != "auto" or choose_device(setting, world, gpus) != "cpu":
        return ""
    if gpus:
        return f"training on the CPU: {world.local_size} local ranks, {gpus} GPU{'s' if gpus > 1 else ''}"
    return f"training on the CPU: no GPU on {world.host}" if _joined(world) else ""


def _joined(world: World) -> bool:
    """Whether another launcher started the ranks."""
    return world.launcher in ("torchrun", "slurm")


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201  # standard output of rank 0 is what the terminal shows


def assign_device(run: ResolvedRun, world: World, tell: Callable[[str], None] = _print) -> World:
    """``world`` with its device chosen; rank 0 tells when it trains on the CPU for want of GPUs.

    Raises :class:`megatron_run.errors.RunError` when there is no such device, or a chosen plugin cannot run on it.
    """
    import torch

    gpus, backend = torch.cuda.device_count(), run.config.run.backend
    device = choose_device(run.config.run.device, world, gpus, shared=backend == "gloo")
    notice = explain_device(run.config.run.device, world, gpus)
    if notice and world.rank == 0:
        tell(notice)
    _check_plugins(run, device)
    return replace(world, device=device, backend=choose_backend(backend, device))


def check_local_devices(run: ResolvedRun) -> tuple[str, ...]:
    """The devices of the ranks that are about to be started here.

    Raises what :func:`assign_device` would on them, the lowest one's first. Nothing is allocated on a GPU: the launcher
    holds none.
    """
    import torch

    gpus, size = torch.cuda.device_count(), run.sizes.world
    worlds = (World(rank, size, rank, size, launcher="local") for rank in range(size))
    setting, backend = run.config.run.device, run.config.run.backend
    chosen = (choose_device(setting, world, gpus, shared=backend == "gloo") for world in worlds)
    devices = tuple(dict.fromkeys(chosen))
    for device in devices:
        choose_backend(backend, device)
        _check_plugins(run, device)
    return devices


def forks_ranks(setting: Literal["auto", "spawn"], devices: Sequence[str]) -> bool:
    """Whether local ranks on ``devices`` are forked from one process: on CPUs, where a fork is safe.

    CUDA cannot be used in a fork of a process that has asked for it, and macOS's libraries start threads when loaded.
    """
    return setting == "auto" and sys.platform == "linux" and set(devices) == {"cpu"}


def _check_plugins(run: ResolvedRun, device: str) -> None:
    for plugin in chain.from_iterable(run.plugins.values()):
        plugin.check_device(device)


def deterministic_environment(wanted: bool | None, device: str) -> dict[str, str]:
    """Variables that must be set before CUDA starts when deterministic kernels are ``wanted`` on ``device``.

    Without a workspace of fixed size cuBLAS may choose another algorithm in the next run, and PyTorch refuses to go
    on; None does not ask for deterministic kernels on a GPU.
    """
    return dict(_CUBLAS) if wanted and device != "cpu" else {}


@contextmanager
def chosen_kernels(wanted: bool | None, device: str) -> Iterator[None]:
    """Within: PyTorch's deterministic kernels, if ``wanted``. None wants them on the CPU, where they cost nothing."""
    import torch
    from torch.utils import deterministic as kernels

    deterministic = device == "cpu" if wanted is None else wanted
    before, compiled = torch.get_deterministic_debug_mode(), deterministic and device != "cpu"
    fill = kernels.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch hides it behind a class
    _make_deterministic(_ERROR if deterministic else 0, compiled=compiled)
    # By default deterministic mode also fills every new tensor, to expose kernels that read uninitialized memory. That
    # makes a step some 5% slower and changes no result, so it is off.
    kernels.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _make_deterministic(before, compiled=compiled)
        kernels.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


#: A kernel that is not deterministic raises, as a number of torch's ``set_deterministic_debug_mode``; 1 warns.
_ERROR = 2


def _make_deterministic(mode: int, *, compiled: bool) -> None:
    """Set torch's mode, for kernels that it has ``compiled`` too: that imports its compiler, for more than a second."""
    import torch

    if compiled:
        torch.use_deterministic_algorithms(mode > 0, warn_only=0 < mode < _ERROR)
    else:
        torch.set_deterministic_debug_mode(mode)


@contextmanager
def deterministic_kernels(device: str) -> Iterator[None]:
    """Within: PyTorch's deterministic kernels on ``device``, as with ``run.deterministic=true``, for comparing bits."""
    with variables_kept(*_CUBLAS):
        _set_cublas(True, device)
        with chosen_kernels(True, device):
            yield


@contextmanager
def rounded_products(precision: str) -> Iterator[None]:
    """Within: products of fp32 values round as ``precision`` says, a value of ``train.matmul_precision``."""
    with _kept_products():
        _set_products(precision)
        yield


@contextmanager
def kept_settings() -> Iterator[None]:
    """Restore afterwards what a rank sets in its process, which may be somebody's program.

    That is: CPU threads, the precision of fp32 products, the current GPU, the CPU's default generator, cuBLAS's
    variable and ``sys.excepthook``, which process groups replace.
    """
    import torch

    threads, hook = torch.get_num_threads(), sys.excepthook
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    try:
        with variables_kept(*_CUBLAS), _kept_products(), torch.random.fork_rng([]):
            yield
    finally:
        sys.excepthook = hook
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if current is not None:
            torch.cuda.set_device(current)


@contextmanager
def _kept_products() -> Iterator[None]:
    """Restore the precision of fp32 products afterwards."""
    before = _precision_of_products()
    try:
        yield
    finally:
        if before is not None:
            _set_products(before)


def _set_products(precision: str) -> None:
    import torch

    if _precision_of_products() is not None:
        torch.set_float32_matmul_precision(precision)


def _precision_of_products() -> str | None:
    """The rounding of fp32 products; None where a program has chosen it by torch's newer settings, which stay."""
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to name one where both kinds of settings were used
        return None


def _set_cublas(wanted: bool | None, device: str) -> None:
    """Set what cuBLAS must find in the environment when CUDA starts; what the user has set stays."""
    for name, value in deterministic_environment(wanted, device).items():
        os.environ.setdefault(name, value)


def join_world(run: ResolvedRun, world: World) -> World:
    """``world`` with this process's device started and, of several ranks, in a process group, which may be there.

    For programs whose ranks do not train; their precision of products stays. Raises
    :class:`megatron_run.errors.RunError` as :func:`assign_device` does.
    """
    import torch.distributed as dist

    placed = assign_device(run, world)
    with _kept_products():
        start_device(run, placed.device)
    if world.size > 1 and not dist.is_initialized():
        method = "env://" if world.launcher == "torchrun" else world.init_method
        dist.init_process_group(placed.backend, method, rank=world.rank, world_size=world.size)
    return placed


def start_device(run: ResolvedRun, device: str) -> None:
    """Make ``device`` current, which starts CUDA, and give products of fp32 values the run's precision."""
    import torch

    _set_cublas(run.config.run.deterministic, device)
    _set_products(run.config.train.matmul_precision)
    if device != "cpu":
        torch.cuda.set_device(torch.device(device))


def gpu_name(device: str) -> str:
    """A name of the GPU behind ``device`` that no other GPU has, on any host; empty for the CPU."""
    import torch

    return "" if device == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def set_threads(run: ResolvedRun, world: World) -> None:
    """Threads of this rank's CPU work. In a Python program ``auto`` leaves what the program chose."""
    import torch

    setting = run.config.run.threads
    if world.launcher != "python" or setting != "auto":
        torch.set_num_threads(threads_per_rank(setting, world.local_size))


@contextmanager
def borrowed_process(run: ResolvedRun, world: World) -> Iterator[None]:
    """Device and threads for ``run`` in a process that belongs to the caller, and is restored afterwards.

    Restored are the default generators and what :func:`kept_settings` names.
    """
    import torch

    gpus = [] if world.device == "cpu" else [torch.device(world.device)]
    with kept_settings():
        _set_cublas(run.config.run.deterministic, world.device)  # before asking for the current GPU starts CUDA
        current = torch.cuda.current_device() if gpus else None
        try:
            with torch.random.fork_rng(gpus):
                start_device(run, world.device)
                set_threads(run, world)
                yield
        finally:
            if current is not None:
                torch.cuda.set_device(current)


def processor_name() -> str:
    """The model of this machine's processor."""
    with suppress(OSError):
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"))
        if found:
            return found[1]
    return platform.processor() or platform.machine()
