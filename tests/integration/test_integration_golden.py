"""The command itself writes the golden losses; so does every split, and the same run twice the same metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.write_golden import SETS
from tests.support.forked import forked_command

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tiny.json").read_text())
#: What two runs of one configuration may differ in: times, and what follows from them.
TIMES = {"time", "step_time_s", "tokens_per_s", "tflops_per_device", "mfu", "memory_peak_gib"}

pytestmark = pytest.mark.multiproc


def trained(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run `megatron-run preset:tiny` with these arguments; the lines of its metrics."""
    sets = [word for setting in (*SETS, "run.threads=1", f"run.folder={folder}") for word in ("--set", setting)]
    words = ("preset:tiny", *sets, *arguments)
    done = forked_command(words, folder.parent)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        # test_integration_parallel has 1f1b, with data parallelism
        pytest.param(("--plugin", "schedule=1f1b"), marks=pytest.mark.nightly),
        ("--plugin", "schedule=interleaved"),
        ("--nproc", "2"),
    ],
    ids=["alone", "1f1b", "interleaved", "data-2"],
)
def test_the_command_writes_the_golden_losses(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    metrics = trained(tmp_path / "run", *arguments)
    np.testing.assert_allclose([line["loss"] for line in metrics], GOLDEN["losses"], rtol=0, atol=1e-5)
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([line["loss"] for line in evaluations], GOLDEN["validation"], rtol=0, atol=1e-5)


def test_the_golden_run_learns() -> None:
    assert GOLDEN["losses"][-1] < GOLDEN["losses"][0] - 0.1


@pytest.mark.nightly  # golden losses are equal from run to run too
def test_two_runs_write_the_same_metrics_apart_from_times(tmp_path: Path) -> None:
    runs = [
        trained(tmp_path / name, "--plugin", "schedule=interleaved", "--set", "model.dropout=0.1")
        for name in ("first", "second")
    ]
    first, second = ([{k: v for k, v in line.items() if k not in TIMES} for line in lines] for lines in runs)
    assert len(first) == 20
    assert first == second
