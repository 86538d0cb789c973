"""The records of an attempt: its configuration, plan, environment, command and host."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

from megatron_run.planning.describe import run_record
from megatron_run.planning.resolver import as_typed
from megatron_run.planning.run import to_yaml
from megatron_run_engine.run_folder.changes import Change
from megatron_run_engine.run_folder.folder import RunFolder
from megatron_run_engine.run_folder.permissions import permission_record

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun


#: Prefixes of the environment variables that influence a run. Others may hold secrets and are not recorded.
_RECORDED = (
    "CUBLAS_", "CUDA_", "GLIBC_TUNABLES", "GLOO_", "KMP_", "LOCAL_WORLD_SIZE", "MALLOC_", "MASTER_", "MEGATRON_RUN_",
    "MKL_", "NCCL_", "OMP_", "PYTORCH_", "SLURM_JOB", "SLURM_NNODES", "SLURM_NTASKS", "TORCH_", "WORLD_SIZE",
)  # fmt: skip


def write_records(folder: RunFolder, run: ResolvedRun) -> None:
    """Write ``config.yaml``, ``plan.json`` and ``environment.json`` of this attempt.

    The first is what was asked for, the second what became of it on the ranks that are there.
    """
    folder.write_record("config.yaml", to_yaml(as_typed(run)))
    folder.write_record("plan.json", plan_record(run))
    folder.write_record("environment.json", environment_record())


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
        "packages": _packages(),
        "variables": {name: text for name, text in sorted(os.environ.items()) if name.startswith(_RECORDED)},
    }


def _packages() -> dict[str, str]:
    """The versions of what is installed, by name. What has none, since its metadata is broken, is left out."""
    versions: dict[str, str] = {}
    for distribution in distributions():
        with suppress(Exception):  # third-party text; importlib_metadata, once imported, raises where it is missing
            described = distribution.metadata  # read once: each of its properties would parse it anew
            if "Name" in described and "Version" in described:
                versions.setdefault(described["Name"], described["Version"])  # the first is imported
    return dict(sorted(versions.items(), key=lambda each: each[0].lower()))


def attempt_record(
    attempt: int, run: ResolvedRun, arguments: Sequence[str], changed: Sequence[Change] = (), why: str = ""
) -> dict[str, Any]:
    """Return the entry of this attempt in ``run.json``, old and new value of each key ``changed`` among it.

    ``why`` is what led to it.
    """
    return {
        "attempt": attempt,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "arguments": list(arguments),
        "folder": str(Path.cwd()),
        "host": gethostname(),
        "process": os.getpid(),
        "ranks": run.sizes.world,
        "git": git_record(),
        "changes": {change.key: [change.before, change.now] for change in changed},
        **permission_record(run.request),
        **_elastic_record(run),
        **({"why": why} if why else {}),
    }


def _elastic_record(run: ResolvedRun) -> dict[str, Any]:
    """The layout that ``run.elastic`` chose, by which policy, and the ranks that it leaves; empty without one."""
    policy = run.config.run.elastic
    return {} if policy == "off" else {"elastic": policy, "layout": asdict(run.sizes), "spares": run.spares}


def git_record() -> dict[str, Any] | None:
    """Return the commit of the current folder, and whether tracked files differ from it; None outside a repository."""
    found = _git({}, "rev-parse", "HEAD", "--show-toplevel", "--git-path", "objects", "--git-path", "index")
    if found is None or found.returncode:
        return None
    commit, tree, objects, index = found.stdout.splitlines()
    changed = None
    with suppress(OSError):  # no room for temporary files
        changed = _differs(commit, tree, objects, index)
    return {"commit": commit, "changed": changed}


def _differs(commit: str, tree: str, objects: str, index: str) -> bool | None:
    """Whether tracked files differ from ``commit``; None where git does not tell. Raises OSError.

    The comparison is made from a repository of our own, which borrows the objects and the index of that one: its
    configuration may name programs (filters, ``core.fsmonitor``), and git would run them.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-run-git-") as repository:
        for folder in ("refs", "objects"):
            Path(repository, folder).mkdir()
        Path(repository, "HEAD").write_text(f"{commit}\n", encoding="ascii")
        Path(repository, "config").write_text("[core]\n\trepositoryformatversion = 0\n", encoding="ascii")
        borrowed = {
            "GIT_DIR": repository,
            "GIT_WORK_TREE": tree,
            "GIT_OBJECT_DIRECTORY": os.path.abspath(objects),  # noqa: PTH100  # a link may lead to a shared store
            "GIT_INDEX_FILE": os.path.abspath(index),  # noqa: PTH100
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_OPTIONAL_LOCKS": "0",  # the index is read and not refreshed
        }
        changed = _git(
            borrowed, "diff", "--quiet", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "HEAD"
        )
    known = changed is not None and changed.returncode in (0, 1)
    return bool(changed.returncode) if changed is not None and known else None


def _git(variables: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str] | None:
    # What git's own variables say (GIT_EXTERNAL_DIFF, GIT_CONFIG_COUNT) is the user's, and of another command.
    plain = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, timeout=5, env={**plain, **variables}
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
