"""The real command in processes of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

COMMAND = (sys.executable, "-m", "megatron_run_cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@contextmanager
def started(words: tuple[str, ...], folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A command running in ``folder``; its whole process group is killed when the block ends early."""
    process = subprocess.Popen(
        words,
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run_command(
    words: tuple[str, ...], folder: Path, *, timeout: float = 90, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder`` to its end."""
    with started(words, folder, **(variables or {})) as process:
        out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def world_of_two(rank: int, port: int, **others: str) -> dict[str, str]:
    """What torchrun tells rank ``rank`` of two that meet at ``port``."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **others,
    }


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
