"""Ranks and hosts that die: the run goes on from what memory still holds, bit for bit, else from the disk.

A host is a folder; ``$RANK`` in ``checkpoint.memory_folder`` leads each rank to that of its host.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest

from tests.support.forked import Ran, learned, run_forked, saved_bits, tiny

pytestmark = pytest.mark.multiproc
PLUGINS = ("schedule=1f1b", "optimizer=zero1")
STEPS, TIMEOUT = 9, 200.0


class Hosts:
    """Two hosts of two ranks each."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / "one", folder / "other"]
        (folder / "of").mkdir()
        for rank in range(4):
            self.folders[rank // 2].mkdir(exist_ok=True)
            (folder / "of" / str(rank)).symlink_to(self.folders[rank // 2])
        self.run = folder / "run"
        self._memory = f"{folder}/of/$RANK"

    def train(self, fault: str = "", nproc: int = 4, restarts: int = 0, interval: int = 0) -> Ran:
        sets = {
            "parallel.pipeline": 2,
            "train.steps": STEPS,
            "checkpoint.interval": interval,
            "checkpoint.memory_interval": 2,
            "checkpoint.memory_folder": self._memory,
            "run.timeout": TIMEOUT,
        }
        asked = tiny(self.run, sets, PLUGINS, nproc=nproc)
        return run_forked(asked, fault, timeout=TIMEOUT, max_restarts=restarts)

    def lose(self, host: int) -> None:
        """All that the memory of ``host`` holds is gone."""
        shutil.rmtree(self.folders[host])
        self.folders[host].mkdir()

    def begun_at(self, attempt: int) -> int:
        """The step from which an attempt went on."""
        return int(json.loads((self.run / "run.json").read_text())["attempts"][attempt - 1]["step"])

    @property
    def empty(self) -> bool:
        return not [path for folder in self.folders for path in folder.glob("*/*")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed, and that knows no memory."""

    @cache
    def undisturbed() -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        sets = {"parallel.pipeline": 2, "train.steps": STEPS, "checkpoint.interval": 0, "run.timeout": TIMEOUT}
        assert run_forked(tiny(folder, sets, PLUGINS, nproc=4), timeout=TIMEOUT).code == 0
        return folder

    return undisturbed()


#: A rank dies while step 8 is done: 4 is saved, and 6 may not be. A step later 6 is: the save of 8 has waited for it.
KILL = "rank=3,step=8,at=forward,kind=kill,attempt=1"
LATE_KILL = "rank=3,step=9,at=forward,kind=kill,attempt=1"


def same_as(whole: Path, run: Path) -> bool:
    return saved_bits(run, STEPS) == saved_bits(whole, STEPS) and learned(run) == learned(whole)


def test_ranks_that_die_go_on_from_memory_by_themselves_and_end_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    ran = hosts.train(KILL, restarts=1)
    assert ran.code == 0, ran
    assert hosts.begun_at(2) in (4, 6), "nothing was saved on disk"
    assert same_as(whole, hosts.run)
    assert hosts.empty
    record = json.loads((hosts.run / "logs" / "attempt-002" / "restart.json").read_text())
    assert set(record["seconds"]) == {
        "detection", "ranks_gone", "processes", "join", "build", "load", "first_step",
    }  # fmt: skip
    rows = [json.loads(line) for line in (hosts.run / "metrics.jsonl").read_text().splitlines()]
    phases = [row["extra"] for row in rows if row.get("extra")]
    assert phases == [{f"restart/{phase}": seconds for phase, seconds in record["seconds"].items()}]
    (line,) = [line for line in ran.told if "starting again" in line]
    assert " (seen after " in line


@pytest.mark.parametrize(
    "lost", [pytest.param((0,), marks=pytest.mark.nightly), (1,), pytest.param((0, 1), marks=pytest.mark.nightly)]
)
def test_a_host_that_is_lost_gets_its_neighbours_copies_and_both_that_are_the_disk(
    lost: tuple[int, ...], whole: Path, tmp_path: Path
) -> None:
    hosts = Hosts(tmp_path)
    assert hosts.train(LATE_KILL, interval=5).code == 4
    for host in lost:
        hosts.lose(host)
    assert hosts.train(interval=5).code == 0
    assert hosts.begun_at(2) in ((6, 8) if len(lost) == 1 else (5,)), "on disk is 5 alone"
    assert same_as(whole, hosts.run)
    assert hosts.empty


@pytest.mark.nightly
def test_two_ranks_go_on_from_the_memory_of_four(whole: Path, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    assert hosts.train(KILL).code == 4
    assert hosts.train(nproc=2).code == 0
    assert hosts.begun_at(2) in (4, 6)
    losses, expected = ([row["loss"] for row in learned(run).values()] for run in (hosts.run, whole))
    assert losses == pytest.approx(expected, rel=2e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("phase", ["save-memory", "save-neighbour", "save-memory-commit"])
def test_ranks_killed_while_they_save_in_memory_lose_no_older_step(phase: str, whole: Path, tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    assert hosts.train(f"rank=2,step=6,at={phase},kind=kill,attempt=1").code == 4
    assert hosts.train().code == 0
    assert hosts.begun_at(2) in (4, 6)
    assert same_as(whole, hosts.run)
