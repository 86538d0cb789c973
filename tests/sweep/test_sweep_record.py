"""The record of a sweep: the same sweep goes on, another one is refused with what to type."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megatron_run.errors import DataError, InputError
from megatron_run.files.run_names import SWEEP_RECORD
from megatron_run_sweep.record import Run, Sweep, read_sweep, same_sweep, write_sweep

SWEEP = Sweep(configs=("a b.yaml",), sets=("train.steps=5",), plugins=("schedule=1f1b",), nproc=2, over=("x.y=1,2",))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    home = tmp_path
    written = SWEEP.model_copy(update={"runs": (Run(values={"x.y": "1"}, exit_code=6, message="why"),)})
    write_sweep(written, home)
    assert read_sweep(home) == written
    write_sweep(SWEEP, home)
    assert read_sweep(home) == SWEEP


def test_the_same_sweep_goes_on_with_its_runs(tmp_path: Path) -> None:
    runs = (Run(values={"x.y": "1"}), Run(values={"x.y": "2"}))
    write_sweep(SWEEP.model_copy(update={"runs": runs, "metric": "train.loss"}), tmp_path)
    assert same_sweep(SWEEP.model_copy(update={"metric": "eval.loss"}), tmp_path).runs == runs
    assert same_sweep(SWEEP, tmp_path / "nowhere").runs == ()


@pytest.mark.parametrize("change", [{"over": ("x.y=1,3",)}, {"sets": ()}, {"nproc": None}, {"sampler": "optuna"}])
def test_another_sweep_is_refused_with_the_command_that_goes_on(tmp_path: Path, change: dict[str, object]) -> None:
    home = tmp_path / "my sweep"
    home.mkdir()
    write_sweep(SWEEP, home)
    with pytest.raises(InputError, match="holds another sweep") as refused:
        same_sweep(SWEEP.model_copy(update=change), home)
    words = shlex.split(refused.value.why)
    assert words == shlex.split(
        "megatron-run sweep 'a b.yaml' --plugin schedule=1f1b --nproc 2 --set train.steps=5 --over x.y=1,2"
    )
    assert f"--folder '{home}-2'" in refused.value.fix


def test_of_a_sampler_the_metric_and_the_seed_are_part_of_the_sweep(tmp_path: Path) -> None:
    drawn = SWEEP.model_copy(update={"sampler": "optuna", "metric": "eval.loss", "seed": 1})
    write_sweep(drawn, tmp_path)
    for change in ({"metric": "train.loss"}, {"seed": 2}, {"maximize": True}):
        with pytest.raises(InputError, match="holds another sweep"):
            same_sweep(drawn.model_copy(update=change), tmp_path)


def test_runs_without_a_record_are_nobodys(tmp_path: Path) -> None:
    home = tmp_path / "my sweep"
    (home / "run-000").mkdir(parents=True)
    with pytest.raises(InputError, match=r"holds run-000, and no sweep\.json") as refused:
        same_sweep(SWEEP, home)
    assert f"--folder '{home}-2'" in refused.value.fix


TWO = json.dumps({"runs": [{"values": {"x.y": "1"}}, {"values": {"x.z": "1"}}]})


@pytest.mark.parametrize(
    "content",
    ["", "[1]", "{", "[" * 100_000, '{"v": 2}', json.dumps({"runs": [{"values": {}}] * 1001}), '{"nproc": "x"}', TWO],
)
def test_a_record_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / SWEEP_RECORD).write_text(content)
    with pytest.raises(DataError, match="cannot be read"):
        read_sweep(tmp_path)


def test_the_words_of_a_run_are_complete(tmp_path: Path) -> None:
    assert SWEEP.words({"x.y": "1"}, Path("f")) == (
        *("train", "a b.yaml", "--plugin", "schedule=1f1b", "--nproc", "2", "--set", "train.steps=5"),
        *("--set", "x.y=1", "--set", "run.folder=f"),
    )
