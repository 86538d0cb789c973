from __future__ import annotations

import pytest

from megatron_run.errors import InputError
from megatron_run_engine.host.environments import (
    expand_nodes,
    find_world,
    slurm_world,
    tasks_per_node,
    torchrun_world,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "2(x3)",
    "SLURM_JOB_ID": "4000123",
    "SLURM_JOB_NODELIST": "gpu[08-10]",
}


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def test_without_a_launcher_there_is_no_world_yet() -> None:
    assert find_world({}) is None
    assert find_world(TORCHRUN | SLURM, "local") is None


def test_torchruns_world() -> None:
    world = find_world(TORCHRUN)
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 8, 1, 4)
    assert (world.init_method, world.serves_store, world.launcher) == ("tcp://node7:29500", False, "torchrun")


@pytest.mark.parametrize(
    ("rank", "agent", "serves"), [("0", None, True), ("0", "True", False), ("0", "False", True), ("1", None, False)]
)
def test_rank_0_listens_unless_torchruns_agent_does(rank: str, agent: str | None, serves: bool) -> None:
    environment = TORCHRUN | {"RANK": rank} | ({"TORCHELASTIC_USE_AGENT_STORE": agent} if agent else {})
    world = find_world(environment)
    assert world is not None
    assert world.serves_store is serves


def test_torchrun_counts_how_often_it_has_started_the_ranks_again() -> None:
    restarts = [torchrun_world(TORCHRUN | variables).restart for variables in ({}, {"TORCHELASTIC_RESTART_COUNT": "2"})]
    assert restarts == [0, 2]


def test_torchrun_wins_over_slurm() -> None:
    """An agent started by srun passes Slurm's variables on to its ranks."""
    world = find_world(TORCHRUN | SLURM)
    assert world is not None
    assert world.launcher == "torchrun"


def test_slurms_world() -> None:
    world = find_world(SLURM)
    assert world is not None
    assert (world.rank, world.size, world.local_rank, world.local_size) == (4, 6, 0, 2)
    assert (world.init_method, world.serves_store) == ("tcp://gpu08:10123", False)
    assert slurm_world(SLURM | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).serves_store


def test_all_ranks_of_a_slurm_step_agree_where_to_meet() -> None:
    places = {slurm_world(SLURM | {"SLURM_PROCID": str(rank)}).init_method for rank in range(6)}
    assert len(places) == 1


def test_a_master_address_wins_over_slurms_hosts() -> None:
    world = slurm_world(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert world.init_method == "tcp://10.0.0.1:1234"


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS"])
def test_a_batch_script_is_no_step(missing: str) -> None:
    assert find_world(without(SLURM, missing)) is None


def test_a_step_of_one_task_starts_its_own_ranks() -> None:
    assert find_world(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(("how", "program"), [("torchrun", "torchrun"), ("slurm", "srun")])
def test_a_launcher_that_did_not_start_us_is_an_error(how: str, program: str) -> None:
    with pytest.raises(InputError, match=f"this process was not started by {program}: .* are not set"):
        find_world({}, how)  # type: ignore[arg-type]  # one of the words


def test_a_variable_that_is_no_number_is_an_error() -> None:
    with pytest.raises(InputError, match="RANK='x' is not a number"):
        find_world(TORCHRUN | {"RANK": "x"})


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7]", ["gpu01", "gpu02", "gpu03", "gpu7"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("rack[1-2]-ib,x9", ["rack1-ib", "rack2-ib", "x9"]),
    ],
)
def test_node_lists_expand(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])])
def test_task_counts_expand(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts
