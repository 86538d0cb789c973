"""Which world the environment of this process describes: torchrun's, Slurm's, or none yet. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from megatron_run.errors import InputError
from megatron_run_engine.runtime.world import World

LaunchMode = Literal["auto", "local", "torchrun", "slurm"]

#: Ports for Slurm jobs, below the ephemeral range: two jobs that share a host seldom share one.
_FIRST_PORT, _PORTS = 10_000, 20_000
_NODE_GROUP = re.compile(r"([^,\[]*)(?:\[([^\]]*)\])?([^,\[]*)")


def find_world(environment: Mapping[str, str], mode: LaunchMode = "auto") -> World | None:
    """The world that ``environment`` describes, or None when the ranks are still to be started.

    Raises :class:`InputError` when ``mode`` names a launcher that did not start this process.
    """
    if mode == "local":
        return None
    if mode == "torchrun" or (mode == "auto" and {"LOCAL_RANK", "WORLD_SIZE"} <= environment.keys()):
        return torchrun_world(environment)
    if mode == "slurm" or (mode == "auto" and _is_slurm_step(environment)):
        return slurm_world(environment)
    return None


def local_world(environment: Mapping[str, str], init_method: str) -> World:
    """The place of a rank that our own launcher started; it speaks torchrun's protocol."""
    return World(
        rank=_integer(environment, "RANK"),
        size=_integer(environment, "WORLD_SIZE"),
        local_rank=_integer(environment, "LOCAL_RANK"),
        local_size=_integer(environment, "LOCAL_WORLD_SIZE"),
        init_method=init_method,
        launcher="local",
    )


def torchrun_world(environment: Mapping[str, str]) -> World:
    """Read torchrun's protocol. Its agent listens at the address unless told otherwise."""
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    _require(environment, needed, "torchrun", "start it as: torchrun --nproc-per-node N -m megatron_run_cli ...")
    rank = _integer(environment, "RANK")
    agent_listens = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return World(
        rank=rank,
        size=_integer(environment, "WORLD_SIZE"),
        local_rank=_integer(environment, "LOCAL_RANK"),
        local_size=_integer(environment, "LOCAL_WORLD_SIZE"),
        init_method=f"tcp://{environment['MASTER_ADDR']}:{_integer(environment, 'MASTER_PORT')}",
        serves_store=rank == 0 and not agent_listens,
        restart=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        launcher="torchrun",
    )


def slurm_world(environment: Mapping[str, str]) -> World:
    """Map a Slurm step: its ranks meet at the first host of the job, at a port that follows from the job's number.

    ``MASTER_ADDR`` and ``MASTER_PORT`` win when they are set.
    """
    needed = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")
    _require(environment, needed, "srun", "start it inside a job as: srun megatron-run ...")
    rank = _integer(environment, "SLURM_PROCID")
    size = _integer(environment, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    address = environment.get("MASTER_ADDR") or expand_nodes(nodes)[0]
    port = int(environment.get("MASTER_PORT") or _FIRST_PORT + _integer(environment, "SLURM_JOB_ID") % _PORTS)
    local_rank = _integer(environment, "SLURM_LOCALID")
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=max(_tasks_here(environment, size), local_rank + 1),
        init_method=f"tcp://{address}:{port}",
        serves_store=rank == 0,
        launcher="slurm",
    )


def expand_nodes(text: str) -> list[str]:
    """``gpu[01-03,7]-ib,login`` -> gpu01-ib, gpu02-ib, gpu03-ib, gpu7-ib, login."""
    nodes: list[str] = []
    position = 0
    while position < len(text):
        match = _NODE_GROUP.match(text, position)
        if match is None or match.end() == position:
            raise InputError(f"{text!r} is not a list of nodes", origin="SLURM_JOB_NODELIST")
        before, group, after = match.groups()
        nodes += [f"{before}{number}{after}" for number in _numbers(group)]
        position = match.end() + 1
    return nodes


def tasks_per_node(text: str) -> list[int]:
    """``2(x3),1`` -> 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise InputError(f"{text!r} is not a list of task counts", origin="SLURM_TASKS_PER_NODE")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _numbers(group: str | None) -> list[str]:
    """The texts that a bracket stands for, zeros in front kept; an absent bracket stands for one empty text."""
    if group is None:
        return [""]
    texts: list[str] = []
    for part in group.split(","):
        first, _, last = part.partition("-")
        texts += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return texts


def _tasks_here(environment: Mapping[str, str], size: int) -> int:
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or str(size)
    counts = tasks_per_node(text)
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else counts[-1]


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Only srun sets the variables of a step; a batch script has SLURM_NTASKS too, but is one process."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    return "SLURM_PROCID" in environment and tasks.isdecimal() and int(tasks) > 1


def _require(environment: Mapping[str, str], names: tuple[str, ...], program: str, fix: str) -> None:
    missing = [name for name in names if name not in environment]
    if missing:
        raise InputError(
            f"this process was not started by {program}",
            why=f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
            fix=fix,
        )


def _integer(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise InputError(f"{name}={environment[name]!r} is not a number", origin="the environment") from None
