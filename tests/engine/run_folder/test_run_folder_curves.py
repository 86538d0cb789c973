"""Curves as a plain reading of the whole file has them, in memory that does not grow with the run."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron_run.drawing.curve import POINTS, Curve, Point, running_mean
from megatron_run.errors import InputError
from megatron_run_engine.run_folder import History, curves
from megatron_run_engine.run_folder.curves import CURVES, LONGEST, read_evaluations, read_metrics
from tests.support.run_folders import step_row, write_lines


def values(curve: Curve) -> list[tuple[float, float]]:
    return [(point.step, point.mean) for point in curve.points]


def test_a_short_run_is_read_as_its_history(tmp_path: Path) -> None:
    rows = [step_row(step, loss=None if step == 3 else 1 / step) for step in range(1, 10)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    found, history = read_metrics(tmp_path), History(tmp_path).metrics
    for name in ("loss", "lr", "tokens_per_s", "model/aux"):
        pairs = zip(history["step"], history[name], strict=True)
        assert values(found.curves[name]) == [(step, value) for step, value in pairs if value is not None]
    assert (found.steps, found.damaged, found.begin, found.end) == (9, 0, 1_700_000_001.0, 1_700_000_009.0)
    assert found.microbatches == 4


@pytest.mark.parametrize("seed", range(5))
def test_a_step_that_was_repeated_counts_as_it_was_last_and_one_that_was_undone_not_at_all(
    tmp_path: Path, seed: int
) -> None:
    random, step = Random(seed), 0
    rows: list[dict[str, Any]] = []
    kept: dict[int, float] = {}
    for _ in range(400):
        step = random.randint(1, step) if step and random.random() < 0.1 else step + random.choice([1, 1, 2])
        value = random.random()
        rows.append({"step": step, "loss": value})
        kept = {before: each for before, each in kept.items() if before < step} | {step: value}
    write_lines(tmp_path / "metrics.jsonl", rows)
    found = read_metrics(tmp_path)
    assert found.steps == len(kept)
    assert values(found.curves["loss"]) == sorted(kept.items())


def test_a_long_run_keeps_its_numbers_and_has_few_points_and_little_memory(tmp_path: Path) -> None:
    steps, random = 20_000, Random(1)
    losses = [random.gauss(3, 1) for _ in range(steps)]
    write_lines(tmp_path / "metrics.jsonl", ({"step": step, "loss": loss} for step, loss in enumerate(losses, 1)))
    tracemalloc.start()
    curve = read_metrics(tmp_path).curves["loss"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000
    assert POINTS // 2 < len(curve.points) <= POINTS
    assert curve.count == steps
    assert curve.mean == pytest.approx(sum(losses) / steps)
    assert curve.lowest == (losses.index(min(losses)) + 1, min(losses))
    assert curve.highest == (losses.index(max(losses)) + 1, max(losses))
    assert (curve.first, curve.last) == ((1, losses[0]), (steps, losses[-1]))
    width = 64
    for point in curve.points[1:-1]:
        number = int(point.step) // width
        span = losses[number * width - 1 : (number + 1) * width - 1]
        assert point.mean == pytest.approx(sum(span) / width)
        assert (point.low, point.high) == (min(span), max(span))


def test_what_is_no_number_or_no_step_is_left_out(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "loss": 1.5, "skipped": true}', "[]", "null",
        '{"step": "2", "loss": 1}', '{"step": -1, "loss": 1}',
        f'{{"step": {10**30}, "loss": 1}}', '{"step": true, "loss": 1}', "\x00\x00", '{"step": 4, "loss": NaN}',
        f'{{"step": 5, "loss": {10**400}}}', '{"step": 6, "loss": [1], "extra": {"mine": 2, "\\ud800": 3}}',
        f'{{"step": 7, "loss": "{"x" * LONGEST}"}}', '{"step": 8, "changes": {"train.lr": [1, 2]}}', '{"step": 9, "lo',
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found = read_metrics(tmp_path)
    assert values(found.curves["loss"]) == [(1.0, 1.5)]
    assert values(found.curves["mine"]) == [(6.0, 2.0)]
    assert set(found.curves) == {"loss", "mine"}
    assert found.skipped == (1,)
    assert found.changes == ((8, {"train.lr": [1, 2]}),)
    assert found.damaged == 9  # seven, and a line too long in two pieces


def test_a_stranger_adds_no_curves_without_end(tmp_path: Path) -> None:
    rows = [{"step": 1, **{f"x{number}": 1 for number in range(1000)}, "loss": 2.0}]
    write_lines(tmp_path / "metrics.jsonl", rows)
    found = read_metrics(tmp_path).curves
    assert len(found) == CURVES + 1
    assert "loss" in found


def test_splits_and_tasks_of_one_step_are_curves_of_their_own(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": step, "split": "validation", "loss": 5.0 - step} for step in (1, 2)]
    rows += [{"step": 2, "split": "lambada", "loss": 9.0, "extra": {"accuracy": 0.5}}]
    rows += [{"step": 2, "split": "validation", "loss": 2.5}]
    write_lines(tmp_path / "eval.jsonl", rows)
    found = read_evaluations(tmp_path)
    assert values(found["validation"].curves["loss"]) == [(1, 4.0), (2, 2.5)]
    assert values(found["lambada"].curves["accuracy"]) == [(2, 0.5)]


def test_a_run_that_goes_on_or_back_while_it_is_read_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = tmp_path / "metrics.jsonl", curves._lines
    write_lines(file, [{"step": step, "loss": 1.0} for step in (1, 2)])

    def growing(folder: Path, name: str) -> Iterator[bytes]:
        yield from read(folder, name)
        with file.open("a") as later:
            later.writelines(f'{{"step": {step}, "loss": 2.0}}\n' for step in (3, 2))

    monkeypatch.setattr(curves, "_lines", growing)
    assert values(read_metrics(tmp_path).curves["loss"]) == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_a_run_without_files_has_no_curves_and_what_is_no_file_is_named(tmp_path: Path) -> None:
    assert not read_metrics(tmp_path).curves
    assert not read_evaluations(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match=r"metrics.jsonl cannot be read: it is a symbolic link"):
        read_metrics(tmp_path)


def test_a_running_mean_is_the_mean_of_the_window() -> None:
    random = Random(3)
    points = [Point(step, value, value, value) for step in range(20) if (value := random.random())]
    for index, point in enumerate(running_mean(points, 5)):
        near = [each.mean for each in points[max(0, index - 2) : index + 3]]
        assert math.isclose(point.mean, sum(near) / len(near))
        assert point.step == index


def test_a_line_is_read_the_same_whether_its_step_is_first_or_not(tmp_path: Path) -> None:
    rows = [{"loss": 1.0 * step, "step": step} for step in (1, 2, 1)] + [step_row(2, loss=7.0)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    assert values(read_metrics(tmp_path).curves["loss"]) == [(1, 1.0), (2, 7.0)]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0]) == rows[0]
