"""Ranks that die on purpose, phase by phase: who it was is said, nothing saved is lost, the run goes on bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_run_engine.checkpoint.step_folder import Checkpoints
from tests.support.forked import Ran, learned, run_forked, saved_bits, tiny

pytestmark = pytest.mark.multiproc

#: Two stages of two data-parallel ranks: messages, reductions and gathered parameters.
PLUGINS = ("schedule=1f1b", "optimizer=zero1")
Kills = Sequence[tuple[str, int, bool]]
#: One after the other, in each step from the second on: the phase at which a rank dies, the rank, and whether the step
#: is saved then.
KILLS = (
    ("data", 0, False),
    ("forward", 1, False),
    ("backward", 2, False),
    ("send", 3, False),
    ("receive", 2, False),
    ("collective", 1, False),
    ("gradient-reduce", 3, False),
    ("optimizer", 0, False),
    ("parameter-gather", 1, False),
    ("save-shard", 2, False),
    ("save-manifest", 0, False),
    ("save-rename", 0, False),
    ("save-latest", 0, True),
    ("save-retention", 0, True),
)
#: The same for steps that are saved behind the training: what they are killed in is the saving of the step before.
KILLS_BEHIND = (
    ("save-flush", 1, False),
    ("save-shard", 3, False),
    ("save-manifest", 0, False),
    ("save-latest", 0, True),
)
#: Steps of a run in which one rank fails, and of the one whose ranks are killed by day while they save behind the
#: training: before a shard is written and before the step's manifest is.
FEW = len(KILLS_BEHIND[::2]) + 2
#: Seconds after which no other rank is left: the launcher's five and what a busy machine adds, less than TIMEOUT.
GONE, TIMEOUT = 60.0, 200.0


def run(folder: Path, fault: str = "", steps: int = FEW, **values: Any) -> Ran:
    sets = {"parallel.pipeline": 2, "train.steps": steps, "run.timeout": TIMEOUT, **values}
    return run_forked(tiny(folder, sets, PLUGINS, nproc=4), fault, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """By its steps, a run that nothing disturbed."""

    @cache
    def undisturbed(steps: int) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        ran = run(folder, steps=steps)
        assert (ran.code, ran.message) == (0, "")
        assert Checkpoints(folder / "checkpoints").steps() == [steps - 1, steps]
        return folder

    return undisturbed


def around(phase: str) -> str:
    """What a rank says it does in ``phase``; a collective is begun in some other one."""
    return "[a-z-]+" if phase == "collective" else phase


def newest_intact(folder: Path) -> int:
    """The newest step, once every byte of every saved step was found as it was written."""
    checkpoints = Checkpoints(folder / "checkpoints")
    for step in checkpoints.steps():
        checkpoints.verify(step)
    newest = checkpoints.newest()
    assert newest is not None
    return newest


@pytest.mark.parametrize(
    ("kills", "behind"),
    [  # test_launch_local has a kill in a phase of a step, test_checkpoint_crashes every point of a save that waits
        pytest.param(KILLS, False, id="in turn", marks=pytest.mark.nightly),
        pytest.param(KILLS_BEHIND, True, id="behind", marks=pytest.mark.nightly),
        pytest.param(KILLS_BEHIND[::2], True, id="behind, by each kind of rank"),
    ],
)
def test_ranks_killed_in_every_phase_are_named_and_the_run_ends_bit_for_bit(
    kills: Kills, behind: bool, whole: Callable[[int], Path], tmp_path: Path
) -> None:
    """One run, whose every attempt is killed a step later."""
    folder, steps = tmp_path / "run", len(kills) + 2
    saving: dict[str, Any] = {"checkpoint.async_save": behind, "steps": steps}
    for attempt, (phase, rank, saved) in enumerate(kills, start=1):
        step = attempt + 1
        died = run(folder, f"rank={rank},step={step},at={phase},kind=kill", **saving)
        assert died.code == 4, phase
        where = ".*" if behind else rf"{around(phase)}.* of step {step}"  # it says what the training does
        said = re.compile(rf"a rank was killed by SIGKILL in {where} \(rank {rank}, log: ")
        assert said.match(died.message), died.message
        assert "\n" not in died.message
        log = folder / "logs" / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.log"  # its last word is what befell it
        assert died.ended - log.stat().st_mtime < GONE, phase
        assert newest_intact(folder) == (step if saved else step - 1), phase
    assert run(folder, **saving).code == 0
    assert saved_bits(folder, steps) == saved_bits(whole(steps), steps)
    assert learned(folder) == learned(whole(steps))
    left = [entry.name for entry in (folder / "checkpoints").iterdir() if entry.name.startswith((".tmp", ".del"))]
    assert not left


def test_a_full_disk_on_one_rank_fails_the_run_and_keeps_what_was_saved(
    whole: Callable[[int], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    full = run(folder, "rank=2,step=3,at=save-shard,kind=enospc")
    assert full.code == 5
    assert full.message.startswith("step 3 could not be saved: No space left on device")
    assert "rank 2" in full.message
    assert newest_intact(folder) == 2
    assert run(folder).code == 0
    assert saved_bits(folder, FEW) == saved_bits(whole(FEW), FEW)


def test_no_memory_on_one_rank_is_named_and_has_its_code(tmp_path: Path) -> None:
    out = run(tmp_path / "run", "rank=3,step=2,at=backward,kind=oom")
    assert out.code == 7
    assert out.message.startswith("the host ran out of memory (from rank 3")
    assert "lower train.micro_batch_size" in out.message


def test_a_rank_that_leaves_without_a_word_is_named(tmp_path: Path) -> None:
    left = run(tmp_path / "run", "rank=1,step=2,at=forward,kind=exit")
    assert left.message.startswith("a rank ended with exit code 9 in forward F0.0 of step 2: fault: exit on rank 1 in ")
