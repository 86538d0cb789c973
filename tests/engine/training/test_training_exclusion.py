"""What a guard writes of the ranks that it names, and what it says where that cannot be written."""

from __future__ import annotations

from pathlib import Path

from megatron_run_engine.run_folder import RunFolder
from megatron_run_engine.run_folder.excluded import read_excluded
from megatron_run_engine.runtime.world import World
from megatron_run_engine.training.health.exclusion import Exclusion, left_out
from tests.support.saved_steps import Alone

WORLD = World(0, 1, local_rank=2, local_size=4, host="gpu1")


def test_a_rank_is_recorded_by_its_host_and_place_there(tmp_path: Path) -> None:
    exclusion = Exclusion(("slow",), RunFolder(tmp_path, 3), WORLD, Alone())
    assert (exclusion.asked("slow"), exclusion.asked("differing")) == (True, False)
    assert exclusion.named([0]) == "local rank 2 of gpu1"
    assert exclusion.record([0], 17, "slow: today") == ""
    (entry,) = read_excluded(tmp_path)
    assert (entry.at, entry.rank, entry.step, entry.attempt, entry.reason) == (("gpu1", 2), 0, 17, 3, "slow: today")
    assert left_out([0, 2]) == "the next start leaves ranks 0 and 2 out, by excluded.json in the run folder"


def test_a_record_that_cannot_be_written_or_read_is_a_line_and_no_error(tmp_path: Path) -> None:
    gone = Exclusion(("slow",), RunFolder(tmp_path / "gone", 1), WORLD, Alone())
    assert gone.record([0], 1, "slow").startswith("which rank is left out cannot be recorded: No such file")
    (tmp_path / "excluded.json").write_text("odd")
    odd = Exclusion(("slow",), RunFolder(tmp_path, 1), WORLD, Alone())
    assert " does not say which ranks are left out: " in odd.record([0], 1, "slow")
    assert (tmp_path / "excluded.json").read_text() == "odd"
