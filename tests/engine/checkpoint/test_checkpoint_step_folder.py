"""Where no step is saved: what a folder's neighbours tell whoever named it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.step_folder import find_checkpoints
from tests.support.saved_steps import random_state, save_alone


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        find_checkpoints(path)
    return str(error.value)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs, the first of which was changed last of those with a step."""
    for name, changed in (("good", 20), ("older", 10)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        save_alone(tmp_path / "runs" / name / "checkpoints", 1, random_state(1))
        os.utime(tmp_path / "runs" / name, (changed, changed))
    (tmp_path / "runs" / "failed").mkdir()
    return tmp_path / "runs"


def test_a_run_without_a_step_names_the_newest_beside_it_that_has_one(runs: Path) -> None:
    told = refusal(runs / "failed")
    assert told.startswith(f"no checkpoints in {runs / 'failed'}: no step is saved there; ")
    assert told.endswith(f"; {runs / 'good'} is the newest beside it with a saved step")


def test_a_misspelt_folder_names_the_one_that_is_there(runs: Path) -> None:
    assert refusal(runs / "oldr").endswith("there is no such folder; did you mean 'older'?")
    assert refusal(runs.parent / "run" / "good").endswith("did you mean 'runs'?"), "the part that is misspelt"
    assert "did you mean" not in refusal(runs / "zzzzzz")
