"""observer=jsonl: strict lines that programs can read, through failures and resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from megatron_run.contracts import EvalMetrics
from megatron_run_engine.builtin.observer.jsonl import JsonLines
from megatron_run_testing.observer import example_run, example_step

FIELDS = [
    "v", "step", "attempt", "time", "samples", "tokens", "loss", "grad_norm", "lr", "loss_scale", "skipped",
    "skipped_total", "microbatches", "step_time_s", "tokens_per_s", "tflops_per_device", "mfu", "memory_peak_gib",
    "extra",
]  # fmt: skip


def strict(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_has_the_documented_fields_in_order(tmp_path: Path) -> None:
    observer = JsonLines()
    observer.on_train_start(example_run(tmp_path, attempt=3))
    observer.on_step_end(example_step(1))
    (line,) = strict(tmp_path / "metrics.jsonl")
    assert list(line) == FIELDS
    assert (line["v"], line["step"], line["attempt"], line["loss"], line["samples"]) == (1, 1, 3, 2.25, 8)
    assert (line["mfu"], line["skipped"], line["extra"]) == (0.25, False, {"model/aux": 0.125})
    observer.on_train_end("finished")


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf"), None])
def test_what_is_not_finite_is_null(tmp_path: Path, loss: float | None) -> None:
    observer = JsonLines()
    observer.on_train_start(example_run(tmp_path))
    observer.on_step_end(example_step(1, loss))
    observer.on_eval_end(EvalMetrics(1, "validation", 800.0, float("inf"), 64))
    observer.on_train_end("finished")
    assert strict(tmp_path / "metrics.jsonl")[0]["loss"] is None
    assert strict(tmp_path / "metrics.jsonl")[0]["grad_norm"] is None
    assert strict(tmp_path / "eval.jsonl") == [
        {"step": 1, "split": "validation", "loss": 800.0, "perplexity": None, "tokens": 64}
    ]


def test_a_sample_is_a_line_with_its_step_and_a_run_without_one_has_no_file(tmp_path: Path) -> None:
    observer = JsonLines()
    observer.on_train_start(example_run(tmp_path, attempt=2))
    assert not (tmp_path / "samples.jsonl").exists()
    observer.on_step_end(example_step(7))
    observer.on_sample("once\n\x1b[2J<b>")
    observer.on_train_end("finished")
    assert strict(tmp_path / "samples.jsonl") == [{"step": 7, "attempt": 2, "text": "once\n\x1b[2J<b>"}]


def test_each_line_is_there_once_written(tmp_path: Path) -> None:
    observer = JsonLines()
    observer.on_train_start(example_run(tmp_path))
    for step in (1, 2, 3):
        observer.on_step_end(example_step(step))
        assert [line["step"] for line in strict(tmp_path / "metrics.jsonl")] == list(range(1, step + 1))
    observer.on_error(RuntimeError("a rank died"))


def test_a_later_attempt_appends(tmp_path: Path) -> None:
    for attempt, steps in ((1, (1, 2)), (2, (2, 3))):
        observer = JsonLines()
        observer.on_train_start(example_run(tmp_path, attempt=attempt))
        for step in steps:
            observer.on_step_end(example_step(step))
        observer.on_train_end("finished")
    lines = strict(tmp_path / "metrics.jsonl")
    assert [(line["attempt"], line["step"]) for line in lines] == [(1, 1), (1, 2), (2, 2), (2, 3)]


def test_half_a_line_of_a_killed_run_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    observer = JsonLines()
    observer.on_train_start(example_run(tmp_path, attempt=2))
    observer.on_step_end(example_step(2))
    observer.on_train_end("finished")
    assert [line["step"] for line in strict(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.timeout(20)
def test_a_file_without_the_end_of_a_line_is_not_read_to_its_beginning(tmp_path: Path) -> None:
    """In a run folder that somebody has prepared: a hole of 40 GB, of which a minute reads a small part."""
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(40 << 30)
    observer = JsonLines()
    with pytest.raises(OSError, match="its last line has more than"):
        observer.on_train_start(example_run(tmp_path))
    assert (tmp_path / "metrics.jsonl").stat().st_size == 40 << 30


def test_a_folder_that_is_gone_raises_at_every_event(tmp_path: Path) -> None:
    observer = JsonLines()
    with pytest.raises(FileNotFoundError):
        observer.on_train_start(example_run(tmp_path / "absent"))
    with pytest.raises(RuntimeError, match="not open"):
        observer.on_step_end(example_step(1))
