"""observer=console: a bar on a terminal, few lines elsewhere, and a fair summary."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console

from megatron_run.contracts import CaptureMetrics, CaptureSize, CheckpointMetrics, DevicePeak, EvalMetrics
from megatron_run_engine.builtin.observer.console import (
    ConsoleObserver,
    ConsoleOptions,
    amount,
    comparison,
    megatron_run_create_observer,
)
from megatron_run_engine.host import in_place
from megatron_run_testing.observer import example_run, example_step
from tests.support.notebook_cell import Cell


def shown(
    folder: Path, steps: int, *, first: int = 1, terminal: bool = False, plain: bool = False, still: float = 2.0
) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=80, _environ={})
    observer = ConsoleObserver(ConsoleOptions(plain=plain), console)
    observer.on_train_start(example_run(folder, first_step=first, steps=steps))
    for step in range(first, steps + 1):
        observer.on_step_end(example_step(step))
    observer.on_eval_end(EvalMetrics(steps, "validation", 1.93, 6.9, 4096))
    observer.on_checkpoint(CheckpointMetrics(steps, folder / "step", 9_876_543, still, 2.0))
    observer.on_sample("x = [red]1[/]\x1b[2J :smile:\n")
    observer.on_train_end("finished")
    return stream.getvalue()


@pytest.mark.parametrize(("first", "steps"), [(1, 1), (1, 7), (1, 36), (1, 100), (1, 300_00), (901, 1000)])
def test_plain_lines_are_few_and_cover_the_run(tmp_path: Path, first: int, steps: int) -> None:
    lines = [line for line in shown(tmp_path, steps, first=first).splitlines() if re.match(r"step +\d+/", line)]
    numbers = [int(line.split("/")[0].removeprefix("step")) for line in lines]
    assert numbers[0] == first
    assert numbers[-1] == steps
    assert numbers == sorted(set(numbers))
    assert min(steps - first + 1, 20) <= len(numbers) <= 50


def test_a_plain_line_holds_the_numbers_and_the_time_left(tmp_path: Path) -> None:
    first, *_ = [line for line in shown(tmp_path, 100).splitlines() if line.startswith("step")]
    assert first == "step   1/100  loss 2.2500  grad norm 1.5  lr 1.00e-04  512 tokens/s  mfu 25%  1 min 39 s left"


def test_a_saved_step_is_told_with_its_size_and_times(tmp_path: Path) -> None:
    assert "step 7  saved 9.9 MB in 2.0 s\n" in shown(tmp_path, 7)
    assert "step 7  saved 9.9 MB in 2.0 s, training stood still for 0.1 s\n" in shown(tmp_path, 7, still=0.123)


def test_plain_output_has_no_control_characters(tmp_path: Path) -> None:
    for terminal, plain in ((False, False), (True, True)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", shown(tmp_path, 10, terminal=terminal, plain=plain))


def test_a_terminal_gets_a_bar_that_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "monotonic", partial(next, count(0.0, 1e-3)))  # however fast this machine is
    text = shown(tmp_path, 12_000, terminal=True)
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "step 12000/12000" in drawn
    assert "loss 2.2500  512 tokens/s" in drawn
    assert "left" in drawn
    assert max(len(line) for line in re.split(r"[\r\n]", drawn) if line.startswith("step")) <= 80
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is given back


def test_the_bar_is_drawn_a_few_times_a_second_only(tmp_path: Path) -> None:
    assert shown(tmp_path, 3000, terminal=True).count("tokens/s") < 100


def test_the_model_cannot_steer_the_terminal(tmp_path: Path) -> None:
    assert "x = [red]1[/]\N{REPLACEMENT CHARACTER}[2J :smile:" in shown(tmp_path, 2)


def test_text_survives_a_terminal_without_unicode(tmp_path: Path) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    observer = ConsoleObserver(ConsoleOptions(), Console(file=stream, _environ={}))
    observer.on_sample("\N{SNOWMAN}!")
    stream.seek(0)
    assert "?!" in stream.read()


def test_the_summary_compares_with_the_baselines(tmp_path: Path) -> None:
    last = shown(tmp_path, 60).splitlines()[-2:]
    assert last == [
        "finished: 60 steps in 1 min 00 s",
        "validation loss 1.930 (perplexity 6.9), below the byte bigram's 2.500",
    ]


def test_a_loss_that_only_rounds_to_the_baseline_is_judged_unrounded() -> None:
    assert comparison(2.4996, {"byte bigram": 2.5}) == ", below the byte bigram's 2.500"
    assert comparison(2.5, {"byte bigram": 2.5}) == ", 0.000 above the byte bigram's 2.500"
    assert comparison(2.5, {"perfect model": 0.75}) == ", 1.750 above the perfect model's 0.750"


def test_a_storm_of_skipped_steps_is_told_now_and_then(tmp_path: Path) -> None:
    stream = io.StringIO()
    observer = ConsoleObserver(ConsoleOptions(), Console(file=stream, width=80, _environ={}))
    observer.on_train_start(example_run(tmp_path, steps=1000))
    for step in range(1, 1001):
        metrics = replace(example_step(step, None), skipped_total=step, loss_scale=2.0**32)
        observer.on_step_end(metrics)
        observer.on_skip(metrics)
    observer.on_train_end("stopped")
    text = stream.getvalue()
    assert text.count("a gradient is not finite") == 10
    assert "step 4 skipped: a gradient is not finite (4 so far, loss scale 4294967296)\n" in text
    assert "1000 steps were skipped" in text


def test_an_error_takes_the_bar_away(tmp_path: Path) -> None:
    stream = io.StringIO()
    observer = ConsoleObserver(ConsoleOptions(), Console(file=stream, force_terminal=True, _environ={}))
    observer.on_train_start(example_run(tmp_path))
    observer.on_step_end(example_step(1))
    observer.on_error(RuntimeError("a rank died"))
    assert stream.getvalue().rstrip().endswith("\x1b[?25h")


def test_the_launcher_decides_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    for plain, escapes in ((False, True), (True, False)):
        observer = megatron_run_create_observer(ConsoleOptions(plain=plain))
        observer.on_train_start(example_run(tmp_path))
        observer.on_train_end("finished")
        assert ("\x1b[" in capsys.readouterr().out) == escapes


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (950, "950"), (12_345, "12.3k"), (4_500_000, "4.5M")])
def test_rates_read_well(value: float, text: str) -> None:
    assert amount(value) == text


@pytest.mark.parametrize(("ranks", "whose"), [(1, ""), (2, " on rank 0 (stage 0):")])
def test_a_capture_is_told_of_the_rank_that_is_seen(ranks: int, whose: str, tmp_path: Path) -> None:
    stream, size = io.StringIO(), CaptureSize(1, 2, 1)
    observer = ConsoleObserver(ConsoleOptions(plain=True), Console(file=stream, width=120))
    observer.on_train_start(replace(example_run(tmp_path), world_size=ranks))
    observer.on_capture(CaptureMetrics(2, size, size, 0.12))
    assert f"step 2  captured{whose} 1 region, 2 graphs, 1 slot in 0.1 s, as planned\n" in stream.getvalue()


def test_the_mfu_is_shown_beside_the_peak_that_it_is_relative_to(tmp_path: Path) -> None:
    stream = io.StringIO()
    observer = ConsoleObserver(ConsoleOptions(plain=True), Console(file=stream, width=120))
    observer.on_train_start(replace(example_run(tmp_path), peak=DevicePeak(0.1234, "run.peak_tflops")))
    observer.on_step_end(replace(example_step(1), mfu=0.416))
    observer.on_step_end(replace(example_step(4), mfu=None))
    observer.on_train_end("finished")
    assert "mfu is relative to 0.123 TFLOP/s a device (run.peak_tflops)\n" in stream.getvalue()
    assert "512 tokens/s  mfu 42%" in stream.getvalue()
    assert stream.getvalue().count("  mfu") == 1


@pytest.mark.parametrize("plain", [False, True])
def test_a_notebook_gets_text_beside_one_output_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, plain: bool
) -> None:
    """Rich would make each line an output of its own, of HTML."""
    cell, file = Cell(monkeypatch), io.StringIO()
    observer = ConsoleObserver(ConsoleOptions(plain=plain), Console(file=file, force_jupyter=True, _environ={}))
    observer.on_train_start(example_run(tmp_path, steps=100))
    for step in range(1, 101):
        observer.on_step_end(example_step(step))
    observer.on_train_end("finished")
    assert [output["text/plain"] for output in cell.outputs] == (
        [] if plain else ["step 100/100  loss 2.2500  512 tokens/s"]
    )
    assert ("step 100/100" in file.getvalue()) == plain
    assert file.getvalue().endswith("finished: 100 steps in 1 min 40 s\n")
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", file.getvalue())
