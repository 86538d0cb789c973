"""What this process holds and has changed: descriptors, threads, shared memory, handlers, variables, torch's switches.

Two censuses tell what the time between them has left. Entries are compared one by one and not by number, so that what
is left is named, and is not hidden by something else that went.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

_SELF = Path("/proc/self")
#: Variables that change by themselves: pytest names the running test, and libraries set theirs when they are loaded.
_NOT_OURS = {
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",  # torch
    "KMP_INIT_AT_FORK",  # torch
    "NO_MKDOCS_2_WARNING",  # mkdocs
    "NVTE_CUDA_INCLUDE_DIR",  # Transformer Engine
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # accelerate
    "TF_CPP_MIN_LOG_LEVEL",  # JAX, which Transformer Engine imports where it is installed
    "TORCHINDUCTOR_CACHE_DIR",  # torch's compiler
    "TPU_SKIP_MDS_QUERY",  # JAX
    "TRITON_CACHE_DIR",  # torch's compiler
    "TRITON_PTXAS_PATH",  # torch's compiler
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",  # torch's compiler
}
#: Threads of tqdm, and of the telemetry of a library that is imported.
_LIBRARIES = ("tqdm_monitor", "Otel")

#: Fork servers, which live as long as this process.
SERVERS: list[Any] = [forkserver._forkserver]

#: What there is, and its name or value.
Entries = Mapping[str, object]


@dataclass(frozen=True)
class Census:
    """What a process ``holds``, which may only become less, and what it ``set``, which may not change at all."""

    descriptors: Entries = field(default_factory=dict, metadata={"held": True})
    threads: Entries = field(default_factory=dict, metadata={"held": True})
    memory: Entries = field(default_factory=dict, metadata={"held": True})
    groups: Entries = field(default_factory=dict, metadata={"held": True})
    handlers: Entries = field(default_factory=dict)
    variables: Entries = field(default_factory=dict)
    switches: Entries = field(default_factory=dict)

    @classmethod
    def take(cls) -> Census:
        """The census of now. Nothing is held where the system has no /proc."""
        return cls(
            dict(_descriptors()),
            dict(_threads()),
            dict(_memory()),
            dict(_groups()),
            dict(_handlers()),
            dict(_variables()),
            switches(),
        )

    @classmethod
    def left_since(cls, before: Census, within: float = 5.0) -> list[str]:
        """As :meth:`left` of now, once pools that were shut down unawaited, as those of transformers, have ended."""
        deadline = time.monotonic() + within
        for thread in _own_threads():
            if str(thread.ident) not in before.threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        return cls.take().left(before)

    def left(self, before: Census) -> list[str]:
        """What is here that was not ``before``, and what is set in another way; a line each."""
        return sorted(line for kind in fields(self) for line in self._left(before, kind))

    def _left(self, before: Census, kind: Field[Any]) -> Iterator[str]:
        now, then = getattr(self, kind.name), getattr(before, kind.name)
        for name in now.keys() if kind.metadata.get("held") else now.keys() | then.keys():
            if now.get(name) != then.get(name):
                yield f"{kind.name}: {name} is {now.get(name, 'gone')}, was {then.get(name, 'not there')}"


def _descriptors() -> Iterator[tuple[str, str]]:
    """Open files by number, but those that live as long as this process: multiprocessing's servers, a GPU's driver."""
    servers = {
        *(server._forkserver_alive_fd for server in SERVERS),
        resource_tracker._resource_tracker._fd,  # type: ignore[attr-defined]
    }
    for path in (_SELF / "fd").glob("*"):
        with suppress(FileNotFoundError):  # the one by which this folder was read
            opened = str(path.readlink())
            if int(path.name) not in servers and not opened.startswith("/dev/nvidia"):
                yield path.name, opened


def _threads() -> Iterator[tuple[str, str]]:
    """Python's threads, but those of libraries, which have one each. Groups take the threads of theirs with them."""
    return ((str(each.ident), each.name) for each in _own_threads())


def _own_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if not each.name.startswith(_LIBRARIES)]


def _memory() -> Iterator[tuple[str, str]]:
    """Mapped segments of shared memory, but semaphores: tqdm has one."""
    if _SELF.is_dir():
        for line in (_SELF / "maps").read_text().splitlines():
            place, _, path = line.partition(" ")
            _, found, name = path.partition("/dev/shm/")
            if found and not name.startswith("sem."):
                yield place, name


def _groups() -> Iterator[tuple[str, str]]:
    """Process groups of torch, by their names."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is not None:
        yield from ((name, str(type(group).__name__)) for group, name in distributed._world.pg_names.items())


def _handlers() -> Iterator[tuple[str, object]]:
    for number in signal.valid_signals() - {signal.SIGALRM}:  # pytest-timeout's
        yield signal.strsignal(number) or str(number), signal.getsignal(number)
    yield "sys.excepthook", sys.excepthook
    yield "threading.excepthook", threading.excepthook


def _variables() -> Iterator[tuple[str, str]]:
    return ((name, value) for name, value in os.environ.items() if name not in _NOT_OURS)


def switches() -> Entries:
    """The choices of torch that hold for a whole process; those of a new one, where it is not loaded."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "compile"):  # it is not loaded whole
        return AS_NEW
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fills new memory": torch.utils.deterministic.fill_uninitialized_memory,
        "threads": torch.get_num_threads(),
        "precision of products": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly detection": torch.is_anomaly_enabled(),
    }


#: The switches of a process that has just loaded torch, with the one thread that the tests give it.
AS_NEW: Entries = {
    "default dtype": "torch.float32",
    "default device": "cpu",
    "deterministic": False,
    "fills new memory": True,
    "threads": 1,
    "precision of products": "highest",
    "gradients": True,
    "inference mode": False,
    "autocast": False,
    "anomaly detection": False,
}


def renew(torch: Any) -> None:
    """Set torch's switches to ``AS_NEW``. Process groups stay."""
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    torch.set_grad_enabled(True)
