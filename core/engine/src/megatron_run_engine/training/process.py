"""What a rank's process gets: its device, its CPU threads, and the environment that must stand before it starts.

torch is imported inside the functions that need it: :func:`prepare_process` must set its variables before that. The
choice of threads and environment was measured: ``python -m benchmarks.single --only settings waiting``.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from megatron_run.errors import InputError
from megatron_run_engine.data.user_cache import keep_compiled
from megatron_run_engine.runtime.cuda_libraries import variables_kept
from megatron_run_engine.runtime.world import World
from megatron_run_engine.training.environments import find_world

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun

Setting = Literal["auto", "cpu", "cuda"]
Backend = Literal["nccl", "gloo"]

#: Keep freed memory, in huge pages: page zeroing costs more than many kernels. The last is the size of free memory,
#: 32 GiB, above which some is handed back.
KEEP_FREED = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=34359738368"
#: How often a waiting thread of GNU's OpenMP looks before it sleeps: some microseconds, where it would be milliseconds.
SPIN_BRIEFLY = "1000"
#: A workspace of fixed size.
_CUBLAS: Mapping[str, str] = MappingProxyType({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
#: Whoever sets one of these has tuned the allocator: glibc's own settings, and another allocator in its place.
_ALLOCATORS = ("MALLOC_", "LD_PRELOAD")


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
    """What to tell the user when the CPU is used for want of GPUs; empty when there was nothing to choose."""
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

    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = kernels.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch hides it behind a class
    torch.use_deterministic_algorithms(device == "cpu" if wanted is None else wanted)
    # By default deterministic mode also fills every new tensor, to expose kernels that read uninitialized memory. That
    # makes a step some 5% slower and changes no result, so it is off.
    kernels.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        kernels.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


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


def available_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota(Path("/sys/fs/cgroup/cpu.max")) or cores))


def _quota(path: Path) -> int | None:
    """Whole cores of a cgroup's ``cpu.max`` (``QUOTA PERIOD`` in microseconds), None when there is no limit."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return None if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def threads_per_rank(setting: int | Literal["auto"], local_size: int, cores: int | None = None) -> int:
    """The value of ``run.threads``, by default cores / local ranks and at least 1."""
    if setting != "auto":
        return setting
    return max(1, (cores or available_cores()) // local_size)


def rank_environment(base: Mapping[str, str], threads: int, local_size: int, cores: int) -> dict[str, str]:
    """``base`` with the variables that OpenMP, MKL, gloo and glibc's allocator read when a rank starts.

    When oversubscribed (ranks x threads exceed the cores), idle OpenMP threads sleep at once: spinning would take the
    cores from threads that work. Otherwise they spin briefly, since whatever else runs here needs a core too. What the
    user has set of all but the threads stays.
    """
    environment = {**base, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    _set_waiting(environment, crowded=local_size * threads > cores)
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    _prepare_torch(environment)
    tunables = environment.get("GLIBC_TUNABLES", "")
    tuned = "glibc.malloc." in tunables or any(name.startswith(_ALLOCATORS) for name in environment)
    if _has_glibc() and not tuned:
        environment["GLIBC_TUNABLES"] = f"{tunables}:{KEEP_FREED}" if tunables else KEEP_FREED
    return environment


def _has_glibc() -> bool:
    name = "CS_GNU_LIBC_VERSION"
    return name in getattr(os, "confstr_names", {}) and bool(os.confstr(name))


def prepare_process(environment: MutableMapping[str, str]) -> None:
    """Give this process, which is about to import torch, what :func:`rank_environment` gives a local rank.

    It is the rank that ``environment`` describes, or the only one. glibc's allocator and gloo are left out: the former
    has read its variables, and the ranks of other hosts are not found by the loopback interface.
    """
    world = None
    with suppress(InputError):  # who starts the rank will say what is wrong
        world = find_world(environment)
    local_size = world.local_size if world is not None else 1
    threads = environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank("auto", local_size)))
    environment.setdefault("MKL_NUM_THREADS", threads)
    crowded = threads.isdecimal() and local_size * int(threads) > available_cores()
    _set_waiting(environment, crowded=crowded)
    _prepare_torch(environment)


def _set_waiting(environment: MutableMapping[str, str], *, crowded: bool) -> None:
    """How long threads of OpenMP spin that wait; ``crowded``: more threads than cores."""
    if crowded:
        if environment.get("GOMP_SPINCOUNT") == SPIN_BRIEFLY:  # of the launcher's own, and stronger than a policy
            del environment["GOMP_SPINCOUNT"]
        environment.setdefault("OMP_WAIT_POLICY", "passive")
    elif "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_BRIEFLY)


def _prepare_torch(environment: MutableMapping[str, str]) -> None:
    """Silence torch's C++ warnings about peers that are late or gone, which we report ourselves.

    A level that the user has set stays. What torch compiles is kept where nobody else writes, if there is such a place.
    """
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with suppress(OSError):
        keep_compiled(environment)
