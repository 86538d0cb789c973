"""The records of an attempt in its run folder: configuration, plan, environment, command and host."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

from megatron_run.planning.describe import run_record
from megatron_run.planning.run import to_yaml
from megatron_run_engine.run_folder.folder import RunFolder, write_json

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun

#: Prefixes of the environment variables that influence a run. Others may hold secrets and are not recorded.
_RECORDED = (
    "CUBLAS_", "CUDA_", "GLIBC_TUNABLES", "GLOO_", "KMP_", "LOCAL_WORLD_SIZE", "MALLOC_", "MASTER_", "MEGATRON_RUN_",
    "MKL_", "NCCL_", "OMP_", "PYTORCH_", "SLURM_JOB", "SLURM_NNODES", "SLURM_NTASKS", "TORCH_", "WORLD_SIZE",
)  # fmt: skip


def write_records(folder: RunFolder, run: ResolvedRun) -> None:
    """Write ``config.yaml``, ``plan.json`` and ``environment.json`` of this attempt."""
    folder.records.joinpath("config.yaml").write_text(to_yaml(run), encoding="utf-8")
    write_json(folder.records / "plan.json", plan_record(run))
    write_json(folder.records / "environment.json", environment_record())


def plan_record(run: ResolvedRun) -> dict[str, Any]:
    """Return plugins with versions and digests, the grid of ranks, the layout of layers and the plan of a step."""
    return {"v": 1, **{key: value for key, value in run_record(run).items() if key != "config"}}


def environment_record() -> dict[str, Any]:
    """Return the machine, the interpreter, the installed packages and the recorded environment variables."""
    return {
        "v": 1,
        "host": gethostname(),
        "platform": platform.platform(),
        "python": sys.version,
        "executable": sys.executable,
        "cores": os.cpu_count(),
        "packages": {each.name: each.version for each in sorted(distributions(), key=lambda each: each.name.lower())},
        "variables": {name: text for name, text in sorted(os.environ.items()) if name.startswith(_RECORDED)},
    }


def attempt_record(attempt: int, run: ResolvedRun, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the entry of this attempt in ``run.json``."""
    return {
        "attempt": attempt,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "arguments": list(arguments),
        "folder": str(Path.cwd()),
        "host": gethostname(),
        "process": os.getpid(),
        "ranks": run.sizes.world,
        "git": git_record(),
    }


def git_record() -> dict[str, Any] | None:
    """Return the commit of the current folder, and whether tracked files differ from it; None outside a repository."""
    commit = _git("rev-parse", "HEAD")
    if commit is None or commit.returncode:
        return None
    changed = _git("diff", "--quiet", "HEAD")
    return {"commit": commit.stdout.strip(), "changed": None if changed is None else bool(changed.returncode)}


def _git(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
