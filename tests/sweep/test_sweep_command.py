"""``megatron-run sweep`` as it is typed: what is refused before a run, what is printed, how a process ends."""

from __future__ import annotations

import io
import json
import shlex
import signal
import sys
from pathlib import Path

import pytest

from megatron_run.files.run_names import SWEEP_RECORD
from megatron_run_cli.main import main
from megatron_run_sweep.commands.starting import run_process
from megatron_run_sweep.record import read_sweep
from tests.support.commands import run_command, started
from tests.support.forked import forked_command
from tests.support.processes import alive, wait_until

TINY = ("preset:tiny", "--set", "model.num_layers=1", "--set", "train.steps=4", "--set", "run.threads=1")
LR = ("--over", "train.lr=1e-3,1e-2")
COMMAND = (sys.executable, "-m", "megatron_run_cli")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())


def test_all_that_is_wrong_is_found_before_the_first_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also an invalid value of the last run, and beside a key that does not exist."""
    words = ("--over", "train.lr=1e-4..1e-2:log,5", "--over", "model.dropout=0,0.1,0.2,0.3,1.5")
    assert main(["sweep", *TINY, *words, "--over", "train.lrr=1,2", "--over", "train.seed=x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        "megatron-run: unknown key train.lrr (from --over train.lrr)",
        "megatron-run: train.seed=x: it must be a whole number (from --over train.seed)",
        "megatron-run: model.dropout=1.5: it must be below 1 (from --over model.dropout)",
    ]
    assert not [*tmp_path.iterdir()]


def test_a_key_is_told_as_it_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *TINY, "--over", "train.a\\1=1,2"]) == 2
    assert "(from --over train.a\\1)" in capsys.readouterr().err


def test_a_fault_of_a_key_that_only_begins_like_a_swept_one_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *TINY, *LR, "--set", "train.lr_decay=xx"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "train.lr_decay" in line
    assert "--over" not in line


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "there is nothing to sweep"),
        (("-", *LR), "standard input is read once"),
        ((*LR, "--runs", "3"), "are of a sampler"),
        ((*LR, "--sampler", "optuna", "--print-commands"), "draws values when earlier runs have ended"),
        ((*LR, "--set", "train.lr=1"), "train.lr is set and swept"),
        ((*LR, "--set", "run.folder=x"), "a folder of its own"),
        ((*LR, "--metric", "eval."), "is no metric"),
        (("--table",), "holds no sweep"),
        (("--over", "train.seed=1..1000,1000", *LR), "2,000 runs: a sweep has at most 1,000"),
    ],
)
def test_words_that_do_not_go_together(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["sweep", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
    assert not [*tmp_path.iterdir()]


def test_commands_are_printed_whole_and_quoted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--folder", "my runs", "--print-commands", "--over", "optimizer.betas=0.9,0.95;0.9,0.99")
    for _ in range(2):  # what is printed may be printed again
        assert main(["sweep", *TINY, *LR, *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 4
        for index, line in enumerate(lines):
            program, *typed = shlex.split(line)
            assert program == "megatron-run"
            assert typed[-1] == f"run.folder=my runs/run-00{index}"
            assert main([*typed, "--dry-run"]) == 0
            capsys.readouterr()
    there = read_sweep(tmp_path / "my runs")
    assert there is not None
    assert [run.values["train.lr"] for run in there.runs] == ["1e-3", "1e-3", "1e-2", "1e-2"]


def test_a_table_of_runs_that_wait(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["sweep", *TINY, *LR, "--print-commands"]) == 0
    capsys.readouterr()
    assert main(["sweep", "--table"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["run", "train.lr", "state", "step", "eval.loss", "tokens/s"],
        ["run-000", "1e-3", "waiting", "0", "-", "-"],
        ["run-001", "1e-2", "waiting", "0", "-", "-"],
    ]
    assert main(["sweep", "--table", "--json"]) == 0
    assert [run["state"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["waiting", "waiting"]
    assert (tmp_path / "runs" / "sweep" / "sweep.svg").is_file()


def test_another_sweep_in_the_folder_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["sweep", *TINY, *LR, "--print-commands"]) == 0
    before = (tmp_path / "runs" / "sweep" / SWEEP_RECORD).read_bytes()
    assert main(["sweep", *TINY, "--over", "train.lr=1e-3,1e-1"]) == 2
    assert "runs/sweep holds another sweep: megatron-run sweep preset:tiny" in capsys.readouterr().err
    assert (tmp_path / "runs" / "sweep" / SWEEP_RECORD).read_bytes() == before


def test_a_key_is_checked_before_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """Who mistypes one in a second sweep reads what is wrong, and not that the folder holds the first."""
    assert main(["sweep", *TINY, *LR, "--print-commands"]) == 0
    assert main(["sweep", *TINY, "--over", "train.lrr=1e-3,1e-2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-run: unknown key train.lrr (from --over train.lrr)")


@pytest.mark.multiproc
def test_a_process_of_a_run_gives_its_code_and_its_last_line(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab+") as output:
        assert run_process(("--version",), output, "") == 0
        assert run_process(("nonsense",), output, "") == 2
    assert "'nonsense' is neither a command nor a configuration" in (tmp_path / "log").read_text()


@pytest.mark.multiproc
def test_a_sweep_trains_and_reads_what_its_run_came_to(tmp_path: Path) -> None:
    """One run, for which the command is started: how several are led and compared, test_sweep_training holds."""
    done = forked_command(("sweep", *TINY, "--over", "train.lr=1e-3", "--json"), tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert run["state"] == "finished"
    assert run["step"] == 4
    evaluations = (tmp_path / "runs" / "sweep" / "run-000" / "eval.jsonl").read_text().splitlines()
    assert run["metric"] == json.loads(evaluations[-1])["loss"]


def _steps(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


@pytest.mark.nightly
@pytest.mark.multiproc
def test_a_sweep_that_is_killed_goes_on_and_runs_nothing_twice(tmp_path: Path) -> None:
    """Two by two runs: killed in the second, told to end in the third; one cannot be trained, and the others are."""
    many = (*TINY[:-4], "--set", "train.steps=60", "--set", "run.threads=1", "--set", "checkpoint.interval=1000")
    words = (*COMMAND, "sweep", *many, *LR, "--over", "model.dropout=0,0.1")
    home = tmp_path / "runs" / "sweep"
    with started(words, tmp_path) as process:
        wait_until(lambda: _steps(home / "run-001") >= 5, 200)
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: json.loads((home / "run-001" / "status.json").read_text())["state"] == "stopped", 60)
    first = (home / "run-000" / "metrics.jsonl").read_bytes()
    assert (home / "run-001" / "checkpoints" / "latest").is_file(), "the run under way has saved its step"

    with started(words, tmp_path) as process:
        wait_until(lambda: _steps(home / "run-002") >= 5, 200)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "megatron-run: interrupted; the same command goes on with run-002"
    assert (home / "run-000" / "metrics.jsonl").read_bytes() == first
    resumed = [json.loads(line)["attempt"] for line in (home / "run-001" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(resumed)) == [1, 2]

    (home / "run-003").write_text("a file where a run belongs\n")
    done = run_command(words, tmp_path, timeout=250)
    assert "run-003 ended with exit code" in done.stderr
    assert done.returncode != 0
    (home / "run-003").unlink()
    done = run_command(words, tmp_path, timeout=250)
    assert done.returncode == 0, done.stderr
    assert [line.split()[3] for line in done.stdout.splitlines()[1:]] == ["finished"] * 4
    losses = [float(line.split()[5]) for line in done.stdout.splitlines()[1:]]
    assert losses == sorted(losses)


@pytest.mark.nightly
@pytest.mark.multiproc
def test_a_second_sweep_in_the_folder_waits_for_nobody(tmp_path: Path) -> None:
    words = (*COMMAND, "sweep", *TINY[:-4], "--set", "train.steps=500", *LR)
    with started(words, tmp_path) as process:
        wait_until(lambda: _steps(tmp_path / "runs/sweep/run-000") > 0, 200)
        other = run_command(words, tmp_path)
        assert other.returncode == 2
        assert f"is under way: process {process.pid} on" in other.stderr
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143


@pytest.mark.multiproc
def test_a_run_ends_with_its_sweep(tmp_path: Path) -> None:
    """Also one that is killed: here before the run's own program begins to answer."""
    program = (
        "import pathlib, sys\nfrom megatron_run_sweep.commands.starting import run_process\n"
        "with pathlib.Path('log').open('ab+') as output:\n    run_process(sys.argv[1:], output, '')\n"
    )
    words = (sys.executable, "-c", program, "preset:tiny", "--set", "train.steps=100000", "--set", "run.folder=f")
    with started(words, tmp_path) as process:
        wait_until(lambda: _children(process.pid), 60)
        (child,) = _children(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: not alive(child), 60)


def _children(pid: int) -> list[int]:
    """The children of a process that have become the command."""
    listed = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [each for each in listed if b"megatron_run_cli" in Path(f"/proc/{each}/cmdline").read_bytes()]
