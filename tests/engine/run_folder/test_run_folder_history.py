"""What a result says of a run: steps, losses, columns, a data frame, the best step that is still there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_run import load_config
from megatron_run.errors import ExitCode, InputError
from megatron_run_engine import train
from megatron_run_engine.launch import RunResult
from megatron_run_engine.run_folder import History


def write(path: Path, *rows: Mapping[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_a_training_returns_its_steps_losses_and_best_step(tmp_path: Path) -> None:
    sets = {"run.folder": tmp_path / "run", "run.threads": 1, "train.steps": 3, "observer.use": "jsonl"}
    result = train(load_config("preset:tiny", sets=sets))
    assert (result.code, result.steps, len(result.losses)) == (ExitCode.DONE, 3, 3)
    assert result.history.metrics["step"] == [1, 2, 3]
    assert result.history.evaluations["step"] == [3]
    assert result.best == tmp_path / "run" / "checkpoints" / "step3"
    again = train(load_config("preset:tiny", sets=sets))
    assert (again.steps, again.losses) == (3, result.losses), "a finished run says the same"


def test_a_repeated_step_counts_once_and_what_plugins_add_is_a_column(tmp_path: Path) -> None:
    rows: list[Mapping[str, Any]] = [
        {"step": 1, "loss": 4.0},
        {"step": 2, "loss": 3.0},
        {"step": 2, "loss": None, "extra": {"mine": 7}},
    ]
    write(tmp_path / "metrics.jsonl", *rows)
    history = History(tmp_path)
    assert history.metrics == {"step": [1, 2], "loss": [4.0, None], "mine": [None, 7]}
    assert history.losses == [4.0, None]


@pytest.mark.parametrize(
    ("evaluated", "saved", "best"),
    [
        ({10: 3.0, 20: 2.0, 30: 2.5}, (10, 20, 30), 20),
        ({10: 3.0, 20: 2.0, 30: 2.5}, (10, 30), 30),
        ({10: 3.0, 20: None}, (10, 20), 10),
        ({20: 2.0, 30: 2.0}, (20, 30), 30),
        ({}, (10, 20), 20),
        ({10: 3.0}, (), None),
    ],
)
def test_the_best_step_is_the_best_that_is_saved(
    tmp_path: Path, evaluated: Mapping[int, float | None], saved: tuple[int, ...], best: int | None
) -> None:
    write(tmp_path / "eval.jsonl", *({"step": step, "loss": loss} for step, loss in evaluated.items()))
    for step in saved:
        (tmp_path / "checkpoints" / f"step{step}").mkdir(parents=True)
    found = History(tmp_path).best
    assert found == (None if best is None else tmp_path / "checkpoints" / f"step{best}")


def test_a_task_of_the_same_step_is_a_row_of_its_own_and_decides_nothing(tmp_path: Path) -> None:
    rows = [{"step": step, "split": "validation", "loss": loss} for step, loss in ((10, 2.0), (20, 3.0))]
    rows += [{"step": step, "split": "lambada", "loss": loss} for step, loss in ((10, 9.0), (20, 1.0), (20, 1.5))]
    write(tmp_path / "eval.jsonl", *rows)
    for step in (10, 20):
        (tmp_path / "checkpoints" / f"step{step}").mkdir(parents=True)
    found = History(tmp_path)
    assert found.evaluations["split"] == ["validation", "lambada"] * 2
    assert found.evaluations["loss"] == [2.0, 9.0, 3.0, 1.5]
    assert found.best == tmp_path / "checkpoints" / "step10"


def test_a_frame_is_pandas_or_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "metrics.jsonl", {"step": 1, "loss": 4.0})
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="a data frame needs pandas; pip install pandas"):
        History(tmp_path).frame()

    class Frame(dict[str, Any]):
        def set_index(self, name: str) -> tuple[str, dict[str, Any]]:
            return name, dict(self)

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=Frame))
    assert History(tmp_path).frame() == ("step", {"step": [1], "loss": [4.0]})


def test_a_run_without_a_folder_has_no_history() -> None:
    with pytest.raises(InputError, match="the run has left no folder"):
        _ = RunResult(ExitCode.DONE).losses
