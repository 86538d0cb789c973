"""The command on a run that goes on: what it refuses leaves the run folder as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked import FORKING_AGENT, forked_command

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]

#: Two stages of the smallest model on a text of bytes, in a folder named ``run``.
TEXT = (
    *("preset:tiny", "--plugin", "schedule=1f1b", "--set", "run.threads=1", "--set", "run.folder=run"),
    *("--set", "data.use=text", "--set", "data.paths=text.txt", "--set", "data.tokenizer=bytes"),
    *("--set", "eval.interval=0"),
)
AGENT = ("--nproc-per-node", "2", "-m", "megatron_run_cli")


def contents(folder: Path) -> dict[str, bytes]:
    """What says what the run is; ``status.json`` says how the last start ended."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    files = (path for path in found if path.name not in (".lock", "status.json"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def said(error: str) -> str:
    """The refusal, on whichever rank."""
    line = next(line for line in error.splitlines() if line.startswith("megatron-run: the training data"))
    return line.partition(" (rank ")[0]


def test_a_refused_extension_changes_nothing_and_a_granted_one_the_configuration_too(tmp_path: Path) -> None:
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("a run that goes on " * 400)
    assert forked_command((*TEXT, "--set", "train.steps=2"), tmp_path).returncode == 0
    before = contents(run)
    longer = (*TEXT, "--set", "train.steps=3", "--extend")

    text.write_text("A run that goes on " + "a run that goes on " * 399)
    local = forked_command(longer, tmp_path)
    joined = forked_command((*AGENT, *longer), tmp_path, program=FORKING_AGENT)
    assert (local.returncode, said(local.stderr)) == (5, said(joined.stderr))
    assert "when step 2 was saved: text.txt has other contents; give the same data" in local.stderr
    assert "log:" not in local.stderr + joined.stderr, "there is none"
    assert contents(run) == before
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"], status["retry"]) == ("finished", 2, 5, False)

    text.write_text("a run that goes on " * 400)
    shorter = forked_command((*TEXT, "--set", "train.steps=1", "--allow-change", "train.steps"), tmp_path)
    assert shorter.returncode == 2
    assert "train.steps=1 ends before step 2" in shorter.stderr
    assert contents(run) == before
    assert forked_command(longer, tmp_path).returncode == 0
    assert "\n  steps: 3\n" in (run / "config.yaml").read_text()
    assert "\n  steps: 2\n" in (run / "logs" / "attempt-001" / "config.yaml").read_text()


def test_a_start_without_its_data_leaves_no_folder(tmp_path: Path) -> None:
    missing = forked_command((*TEXT, "--json"), tmp_path)
    answer = json.loads(missing.stdout)
    assert (missing.returncode, answer["folder"]) == (5, None)
    assert "log:" not in answer["message"]
    assert not list(tmp_path.iterdir())
    kept = forked_command((*TEXT, "--debug"), tmp_path)
    assert f"log: {tmp_path / 'run' / 'logs'}" in kept.stderr
    assert "Traceback" in (tmp_path / "run" / "logs" / "attempt-001" / "rank-00000.log").read_text()
