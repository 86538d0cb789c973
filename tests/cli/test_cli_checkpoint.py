"""``checkpoint list | verify | inspect``: text, JSON, exit codes, and none of it needs torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_run.files.latest_run import point_latest_at
from megatron_run_cli.main import main
from megatron_run_engine.checkpoint.step_folder import verify_files
from tests.support.saved_steps import random_state, save_alone

Output = pytest.CaptureFixture[str]
SHARD = "rank-00000.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with steps 10 and 20."""
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (10, 20):
        save_alone(folder / "checkpoints", step, random_state(step, tensors=2))
    return folder


def damage(run: Path, step: int) -> Path:
    file = run / "checkpoints" / f"step{step}" / SHARD
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


def told(capsys: Output, *words: object, code: int = 0) -> str:
    assert main(["checkpoint", *map(str, words)]) == code
    return capsys.readouterr().out


def as_json(capsys: Output, *words: object, code: int = 0) -> Any:
    return json.loads(told(capsys, *words, "--json", code=code))


def test_the_list_tells_each_step(run: Path, capsys: Output) -> None:
    first, second = told(capsys, "list", run).splitlines()
    assert first.split()[:2] == ["step10", "whole"]
    assert second.split()[:2] == ["step20", "whole"]
    assert ("latest" in first, "latest" in second) == (False, True)
    assert "1 rank" in first


@pytest.mark.parametrize("place", [".", "checkpoints", "checkpoints/step20"])
def test_a_run_its_checkpoints_or_a_step_may_be_named(run: Path, place: str, capsys: Output) -> None:
    assert [each["step"] for each in as_json(capsys, "list", run / place)["steps"]] == [10, 20]


def test_the_latest_run_needs_no_name(run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = run.parent / "runs" / "20261126-120000-00aa"
    newest.parent.mkdir()
    shutil.copytree(run, newest)
    point_latest_at(newest)
    monkeypatch.chdir(run.parent)
    assert as_json(capsys, "list")["latest"] == 20
    for named in ("runs/latest", "runs/latest/checkpoints", "runs/latest/checkpoints/step10"):
        assert [each["step"] for each in as_json(capsys, "list", named)["steps"]] == [10, 20]
    newest.rename(run.parent / "elsewhere")
    assert main(["checkpoint", "list", "runs/latest"]) == 5
    said = capsys.readouterr().err
    assert "runs/latest names it, and it is gone" in said
    assert "did you mean" not in said


def test_where_nothing_is_saved_one_line_says_so(tmp_path: Path, capsys: Output) -> None:
    assert main(["checkpoint", "list", str(tmp_path)]) == 5
    assert capsys.readouterr().err.count("\n") == 1


def test_a_truncated_step_is_listed_as_damaged(run: Path, capsys: Output) -> None:
    file = run / "checkpoints" / "step10" / SHARD
    file.write_bytes(file.read_bytes()[:-1])
    first = told(capsys, "list", run).splitlines()[0]
    assert "damaged" in first
    assert str(file) in first


def test_verify_reads_every_byte(run: Path, capsys: Output) -> None:
    assert told(capsys, "verify", run).count("intact: 1 file") == 2
    file = damage(run, 10)
    assert "whole" in told(capsys, "list", run).splitlines()[0], "a list does not read contents"
    first, second = told(capsys, "verify", run, code=5).splitlines()
    assert first == f"step10  damaged: {file} is damaged: its SHA-256 is not that of the manifest"
    assert "intact" in second
    found = as_json(capsys, "verify", run, code=5)["steps"]
    assert [each["ok"] for each in found] == [False, True]


def test_a_step_that_a_training_removes_meanwhile_is_not_called_damaged(
    run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(folder: Path, *arguments: Any, **options: Any) -> None:
        if folder.name == "step10" and folder.exists():
            shutil.rmtree(folder)
        verify_files(folder, *arguments, **options)

    monkeypatch.setattr("megatron_run_cli.reports.saved_steps.verify_files", removed)
    assert told(capsys, "verify", run).splitlines()[0].startswith("step20  intact")
    save_alone(run / "checkpoints", 10, random_state(10, tensors=2))
    assert main(["checkpoint", "verify", str(run), "--step", "10"]) == 5
    said = capsys.readouterr()
    assert "damaged" not in said.out
    assert "cannot be read" in said.err


def test_verify_one_step(run: Path, capsys: Output) -> None:
    damage(run, 10)
    assert told(capsys, "verify", run, "--step", 20).startswith("step20  intact")
    assert told(capsys, "verify", run / "checkpoints" / "step20").startswith("step20  intact")
    told(capsys, "verify", run, "--step", 10, code=5)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_step_that_was_never_saved_is_not_called_damaged(run: Path, more: tuple[str, ...], capsys: Output) -> None:
    assert main(["checkpoint", "verify", str(run), "--step", "15", *more]) == 5
    said = capsys.readouterr()
    missing = run / "checkpoints" / "step15"
    message = f"there is no checkpoint {missing}; saved steps: 10, 20"
    assert said.err == f"megatron-run: {message}\n"
    assert (json.loads(said.out)["message"] if "--json" in more else said.out) == (message if "--json" in more else "")


def test_inspect_tells_what_a_step_holds(run: Path, capsys: Output) -> None:
    text = told(capsys, "inspect", run)
    assert text.startswith("step 20 of run 0123456789abcdef, saved 2026-11-21T09:00:00+0000")
    assert "optimizer  adamw  megatron-run-core==0.1.0, state version 1" in text
    shape = list(random_state(20, tensors=2)["layers.1.weight"]["master"].shape)
    assert f"layers.1.weight  {shape}  master F32, exp_avg" in text
    assert "step F32 []" in text
    assert "  scale       65536\n" in text
    assert as_json(capsys, "inspect", run, "--step", 10)["about"]["counters"]["samples"] == 80


def test_the_commands_load_no_torch(run: Path) -> None:
    code = (
        "import sys; from megatron_run_cli.main import main\n"
        f"codes = [main(['checkpoint', word, {str(run)!r}]) for word in ('list', 'verify', 'inspect')]\n"
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
