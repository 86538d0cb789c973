"""The runs of a sweep one after the other, with a stand-in for their processes that writes what a run writes."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from megatron_run.files.run_names import SWEEP_RECORD
from megatron_run_cli.main import main
from megatron_run_engine.run_folder import FolderLock
from megatron_run_sweep.commands import starting
from megatron_run_sweep.outcomes import EXCLUSIVE
from megatron_run_sweep.record import Sweep, read_sweep, run_name, write_sweep

HOME = Path("runs", "sweep")
TINY = ("preset:tiny", "--set", "model.num_layers=1")
LR = ("--over", "train.lr=1e-3,1e-2")
GRID = ("sweep", *TINY, *LR, "--over", "model.dropout=0,0.1")
DRAWN = ("sweep", *TINY, "--over", "train.lr=1e-4..1e-2:log", "--sampler", "optuna", "--runs")


class Runs:
    """Stands for the processes of runs: how each in ``ends`` ends, and which were started, in ``began``."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ends: dict[str, int | type[BaseException]] = {}
        self.line: str | None = None  # of the evaluation; else a loss

    def __call__(self, words: Sequence[str], output: BinaryIO, advice: str) -> int:
        assert words[0] == "train"
        assert words[-1] == "--quiet"
        values = dict(word.split("=", 1) for word in words if "=" in word)
        folder = Path(values["run.folder"])
        folder.mkdir(exist_ok=True)
        self.began.append(folder.name)
        end = self.ends.get(folder.name, 0)
        state = "stopped" if isinstance(end, type) else "failed" if end else "finished"
        loss = float(values["train.lr"]) * 100 + float(values.get("model.dropout", 0))
        (folder / "status.json").write_text(json.dumps({"state": state, "step": 4}))
        line = json.dumps({"step": 4, "split": "validation", "loss": loss}) + "\n" if self.line is None else self.line
        (folder / "eval.jsonl").write_text(line)
        if isinstance(end, type):
            error = end()
            error.add_note(advice)
            raise error
        output.write(b"megatron-run: a reason\n" if end else b"")
        return end


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    found = Runs()
    monkeypatch.setattr(starting, "run_process", found)
    return found


def record() -> Sweep:
    found = read_sweep(HOME)
    assert found is not None
    return found


def test_a_grid_is_trained_and_compared(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.ends = {"run-001": 6}
    assert main(GRID) == 6, "the exit code of the run that failed"
    assert runs.began == [run_name(index) for index in range(4)], "and the others are trained"
    out, err = capsys.readouterr()
    rows = [line.split()[:4] for line in out.splitlines()[1:]]
    assert rows == [
        ["run-000", "1e-3", "0", "finished"],
        ["run-002", "1e-2", "0", "finished"],
        ["run-003", "1e-2", "0.1", "finished"],
        ["run-001", "1e-3", "0.1", "failed"],
    ]
    assert "run-001 ended with exit code 6: a reason" in err
    assert [run.exit_code for run in record().runs] == [0, 6, 0, 0]

    runs.ends, runs.began = {}, []
    assert main(GRID) == 0
    assert runs.began == ["run-001"], "what is finished is left alone, and what failed is tried again"


def test_a_metric_that_no_plugin_adds_ends_the_sweep_after_one_run(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether there is one, nobody knows before; the same command goes on with another, and repeats nothing."""
    for _ in range(2):
        assert main((*GRID, "--metric", "accuracy")) == 2
        assert capsys.readouterr().err.splitlines()[-1] == (
            "megatron-run: run-000 has no eval.accuracy: there is eval.loss (from --metric); "
            "name one that is there; the same command goes on with it"
        )
    assert runs.began == ["run-000"]
    assert main(("sweep", "--table", "--metric", "accuracy")) == 2
    assert "no run has eval.accuracy: there is eval.loss" in capsys.readouterr().err
    assert main((*GRID, "--metric", "eval.loss")) == 0
    assert runs.began == [run_name(index) for index in range(4)]


@pytest.mark.parametrize("value", ["NaN", "null"])
def test_a_metric_that_is_null_in_one_run_compares_the_others_and_in_all_is_told(
    runs: Runs, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the loss of runs that diverged: each is a number of that name, and the sweep goes on."""
    name = ("--metric", "accuracy")
    runs.line = f'{{"split": "validation", "extra": {{"accuracy": {value}}}}}\n'
    assert main((*GRID, *name)) == 2
    assert runs.began == [run_name(index) for index in range(4)]
    assert capsys.readouterr().err.splitlines()[-1] == (
        "megatron-run: no run has eval.accuracy: its last value is null or not finite (from --metric); "
        "name another; the same command goes on with it"
    )
    (HOME / "run-002" / "eval.jsonl").write_text('{"split": "validation", "extra": {"accuracy": 0.5}}\n')
    assert main((*GRID, *name)) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("run-002 ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "run-000 has no eval.loss: its eval.jsonl has no number (from --metric); name one of the steps, "),
        (("--metric", "train.loss"), "run-000 has no train.loss: its metrics.jsonl has no number"),
    ],
)
def test_a_first_run_without_any_number_ends_the_sweep(
    runs: Runs, words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of data without a validation split, which nothing evaluates."""
    runs.line = ""
    assert main((*GRID, *words)) == 2
    assert line in capsys.readouterr().err
    assert runs.began == ["run-000"]


def test_a_name_that_is_nearly_another_is_told_and_may_be_there(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.line = '{"split": "validation", "loss": 2.0, "extra": {"loss2": 1.0}}\n'
    assert main((*GRID, "--metric", "eval.loss2")) == 0
    assert "did you mean eval.loss?" in capsys.readouterr().err.splitlines()[0]


def test_a_sweep_that_is_stopped_goes_on(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.ends = {"run-001": KeyboardInterrupt}
    assert main(GRID) == 130
    assert capsys.readouterr().err.endswith("interrupted; the same command goes on with run-001\n")
    runs.ends = {}
    assert main(GRID) == 0
    assert runs.began == ["run-000", "run-001", "run-001", "run-002", "run-003"]


def test_values_are_drawn_one_run_at_a_time(runs: Runs) -> None:
    pytest.importorskip("optuna")
    runs.ends = {"run-001": KeyboardInterrupt}
    assert main((*DRAWN, "3")) == 130
    before = [run.values for run in record().runs]
    assert len(before) == 2, "the third is drawn by what the second comes to"
    runs.ends = {}
    assert main((*DRAWN, "3")) == 0
    found = [run.values for run in record().runs]
    assert found[:2] == before
    assert len({each["train.lr"] for each in found}) == 3
    assert all(1e-4 <= float(each["train.lr"]) <= 1e-2 for each in found)
    assert runs.began == ["run-000", "run-001", "run-001", "run-002"]


def test_the_runs_of_another_sweep_are_not_taken_for_its_own(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("sweep", *TINY, *LR)) == 0
    (HOME / SWEEP_RECORD).unlink()
    before = sorted(path.name for path in HOME.iterdir())
    assert main(("sweep", *TINY, "--over", "train.lr=0.5")) == 2
    assert "holds run-000, and no sweep.json" in capsys.readouterr().err
    assert sorted(path.name for path in HOME.iterdir()) == before
    assert len(runs.began) == 2


@pytest.mark.parametrize("more", [(), ("--print-commands",)])
def test_the_record_is_written_by_one_sweep_at_a_time(
    runs: Runs, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    HOME.mkdir(parents=True)
    with FolderLock(HOME):
        assert main((*GRID, *more)) == 2
    assert "the sweep in runs/sweep is under way: process" in capsys.readouterr().err
    assert [path.name for path in HOME.iterdir()] == [".lock"]
    assert runs.began == []


def test_a_lock_that_a_killed_process_leaves_is_told_with_what_to_delete(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a file system without flock."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    HOME.mkdir(parents=True)
    with FolderLock(HOME):
        assert main(GRID) == 2
    assert "if that process is gone, delete runs/sweep/.lock-exclusive" in capsys.readouterr().err

    assert main((*GRID, "--print-commands")) == 0
    left = HOME / "run-000" / EXCLUSIVE
    left.parent.mkdir()
    for path in (left, left.with_name(".lock")):
        path.touch()
    monkeypatch.setattr(time, "sleep", lambda _: left.unlink())
    assert main(GRID) == 0
    assert f"waited for; if that process is gone, delete {left}" in capsys.readouterr().err
    assert runs.began[0] == "run-000"


def test_a_sweep_that_began_meanwhile_is_seen(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After this one has looked, before it locks the folder."""
    other = Sweep(over=("x.y=1",))

    @contextmanager
    def meanwhile(home: Path) -> Iterator[None]:
        home.mkdir(parents=True)
        write_sweep(other, home)
        yield

    monkeypatch.setattr(starting, "alone", meanwhile)
    assert main(GRID) == 2
    assert "holds another sweep" in capsys.readouterr().err
    assert record() == other
    assert runs.began == []


def test_without_the_engine_nothing_is_made(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "megatron_run_engine.run_folder.lock", None)
    assert main(GRID) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "this machine cannot train the runs of a sweep" in line
    assert "pip install" in line
    assert not [*tmp_path.iterdir()]
    assert runs.began == []


def test_a_folder_behind_a_link_is_the_users_and_a_file_is_none(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    assert main((*GRID, "--print-commands")) == 0
    assert (tmp_path / "scratch" / "sweep" / SWEEP_RECORD).is_file()
    (tmp_path / "file").touch()
    capsys.readouterr()
    assert main((*GRID, "--folder", "file/sweep")) == 2
    assert "file/sweep cannot hold a sweep" in capsys.readouterr().err
    assert runs.began == []
