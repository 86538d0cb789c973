"""A batch that grows: what is planned for it can be run at each of its sizes, and takes the memory that was planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_run_cli.main import main


@pytest.mark.parametrize(
    ("dropout", "gpus", "start"),
    [pytest.param(0.0, "64", 32, marks=pytest.mark.nightly), (0.1, "64", 32), (0.0, "8", 16)],
)
def test_the_best_of_a_ramp_up_passes_the_dry_run_which_counts_the_same_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, dropout: float, gpus: str, start: int
) -> None:
    file = tmp_path / "best.yaml"
    sets = ["model.num_layers=8", "model.hidden_size=512", "model.vocab_size=32000", f"model.dropout={dropout}"]
    sets += [
        "model.num_heads=8",
        "train.sequence_length=512",
        "train.precision=bf16",
        "train.global_batch_size=256",
        "train.samples=30000",
    ]
    sets += [
        f"train.ramp_up.{key}={value}" for key, value in {"start": start, "increment": start, "samples": 9000}.items()
    ]
    words = ["preset:tiny", *(word for each in sets for word in ("--set", each))]
    assert main(["plan", *words, "--gpus", gpus, "--device", "h100", "--write", str(file)]) == 0
    assert "train.ramp_up does not divide" in capsys.readouterr().out
    assert main([str(file), "--dry-run", "--plugin", "data=mock", "--device", "h100", "--json"]) == 0
    counted = max(json.loads(capsys.readouterr().out)["memory"]["tensors_by_stage"])
    assert main(["plan", str(file), "--as-is", "--gpus", gpus, "--device", "h100", "--json"]) == 0
    (planned,) = json.loads(capsys.readouterr().out)["candidates"]
    assert counted == pytest.approx(planned["tensors"], rel=0.05)  # biases and norms are left out of the form


def test_a_searched_schedule_is_written_for_one_batch_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ramp = [f"train.ramp_up.{key}={value}" for key, value in {"start": 8, "increment": 8, "samples": 100}.items()]
    sets = ["train.global_batch_size=32", "parallel.pipeline=2", *ramp]
    words = ["plan", "schedule", "preset:tiny", *(word for each in sets for word in ("--set", each))]
    assert main([*words, "--write", str(tmp_path / "mine.py")]) == 2
    assert "for one number of microbatches: train.ramp_up has 4 sizes of the batch" in capsys.readouterr().err
    assert not (tmp_path / "mine.py").exists()
