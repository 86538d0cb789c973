"""What a guard writes of the ranks that it names, and what it says where that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.planning import ResolvedRun, load_config
from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.run_folder.excluded import read_excluded
from megatron_run_engine.runtime.world import World
from megatron_run_engine.training.health.exclusion import Exclusion, left_out
from tests.support.saved_steps import Alone

WORLD = World(0, 1, local_rank=2, local_size=4, host="gpu1")


def elastic(ranks: int, *sets: str, batch: int = 12) -> ResolvedRun:
    asked = ("run.elastic=data", "guard.exclude=slow", f"train.global_batch_size={batch}", *sets)
    return load_config("preset:tiny", sets=asked, nproc=ranks)


def test_a_rank_is_recorded_by_its_host_and_place_there(tmp_path: Path) -> None:
    exclusion = Exclusion(elastic(3), RunFolder(tmp_path, 3), WORLD, Alone())
    assert (exclusion.asked("slow"), exclusion.asked("differing")) == (True, False)
    assert exclusion.named([0]) == "local rank 2 of gpu1"
    assert exclusion.record([0], 17, "slow: today") == ""
    (entry,) = read_excluded(tmp_path)
    assert (entry.at, entry.rank, entry.step, entry.attempt, entry.reason) == (("gpu1", 2), 0, 17, 3, "slow: today")
    assert left_out([0, 2]) == "the next start leaves ranks 0 and 2 out, by excluded.json in the run folder"


def test_a_record_that_cannot_be_written_or_read_is_a_line_and_no_error(tmp_path: Path) -> None:
    gone = Exclusion(elastic(3), RunFolder(tmp_path / "gone", 1), WORLD, Alone())
    assert gone.record([0], 1, "slow").startswith(
        "rank 0 cannot be left out: which rank is left out cannot be recorded: No such file"
    )
    (tmp_path / "excluded.json").write_text("odd")
    odd = Exclusion(elastic(3), RunFolder(tmp_path, 1), WORLD, Alone())
    assert " does not say which ranks are left out: " in odd.record([0], 1, "slow")
    assert (tmp_path / "excluded.json").read_text() == "odd"


@pytest.mark.parametrize(
    ("ranks", "sets", "why"),
    [
        (1, [], ""),
        (2, ["run.min_ranks=2"], "1 rank is too few"),
        (4, ["parallel.tensor=2", "parallel-layer=tensor", "run.min_ranks=4"], "3 ranks are too few"),
        (2, ["parallel.tensor=2", "parallel-layer=tensor"], "1 rank is too few"),
    ],
)
def test_a_rank_without_which_no_layout_fits_is_not_recorded(
    ranks: int, sets: list[str], why: str, tmp_path: Path
) -> None:
    failure = Exclusion(elastic(ranks, *sets), RunFolder(tmp_path, 1), WORLD, Alone()).record([0], 1, "slow")
    assert failure.startswith(f"rank 0 cannot be left out: {why}")
    assert not read_excluded(tmp_path)


def test_a_spare_may_take_the_place_of_one_that_cannot_be_spared(tmp_path: Path) -> None:
    run = elastic(3, "run.min_ranks=2", batch=8)
    assert (run.sizes.world, run.spares) == (2, 1)
    assert Exclusion(run, RunFolder(tmp_path, 1), WORLD, Alone()).record([0], 1, "slow") == ""
