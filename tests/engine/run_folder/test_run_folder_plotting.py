"""The curves of runs by one call: which charts there are, which runs are in them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_run.drawing.sheet import Picture
from megatron_run.errors import ExitCode, InputError
from megatron_run_engine import History
from megatron_run_engine.launch import RunResult
from megatron_run_report.record import Record
from tests.support.run_folders import make_run, step_row, write_lines

SVG = "{http://www.w3.org/2000/svg}"


def charts(picture: Picture) -> list[str]:
    """What each chart shows, as read aloud."""
    return [each.get("aria-label", "") for each in ElementTree.fromstring(picture.svg).iter(f"{SVG}svg")][1:]


def texts(picture: Picture, kind: str) -> list[str]:
    return [
        each.text or "" for each in ElementTree.fromstring(picture.svg).iter(f"{SVG}text") if each.get("class") == kind
    ]


def test_a_result_and_its_folder_later_are_drawn_alike(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine")
    picture = RunResult(ExitCode.DONE, run, steps=8).plot()
    assert charts(picture) == [
        "Loss in training, and of validation (squares) over steps",
        "Learning rate over steps",
        "Gradient norm, before clipping over steps",
        "Throughput over steps",
    ]
    assert History(run).plot() == picture
    assert picture._repr_svg_() == picture.svg
    assert repr(picture) == "curves of mine: a notebook draws this; elsewhere .save('curves.svg')"
    drawn = [group for group in ElementTree.fromstring(picture.svg).iter(f"{SVG}g") if group.get("data-steps")]
    first, second, *_ = drawn
    assert first.get("data-steps") == "1,2,3,4,5,6,7,8"
    assert (second.get("data-steps"), second.get("data-values")) == ("4,8", "1.5,1.25")


def test_runs_beside_each_other_share_charts_and_have_letters(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("first", "second", "third")]
    picture = History(runs[0]).plot(str(runs[1]), RunResult(ExitCode.DONE, runs[2]))
    assert charts(picture)[:2] == ["Training loss over steps", "Validation loss over steps"]
    assert texts(picture, "name") == ["first", "second", "third"]
    assert texts(picture, "letter")[:3] == ["A", "B", "C"]
    with pytest.raises(InputError, match="the run has left no folder"):
        History(runs[0]).plot(RunResult(ExitCode.DONE))
    with pytest.raises(InputError, match="5 runs in one picture: it holds 4"):
        History(runs[0]).plot(*[runs[1]] * 4)


def test_runs_of_sweeps_have_the_names_that_a_report_gives_them(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / sweep / "run-000") for sweep in ("wide", "deep")]
    for run in runs:
        (run.parent / "sweep.json").touch()
    names = [Record(run).name for run in runs]
    assert names == ["wide/run-000", "deep/run-000"]
    assert texts(History(runs[0]).plot(runs[1]), "name") == names


def test_curves_are_chosen_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_lines(run / "metrics.jsonl", [step_row(step, extra={"mine/<x>": step}) for step in range(1, 900)])
    picture = History(run).plot(names=["mine/<x>", "validation.perplexity"])
    assert charts(picture) == ["mine/<x> over steps", "Validation perplexity over steps"]
    write_lines(run / "metrics.jsonl", [step_row(step, extra={"moe.load": step}) for step in range(1, 9)])
    assert charts(History(run).plot(names=["moe.load"])) == ["moe.load over steps"], "a plugin's, and no evaluation"
    with pytest.raises(InputError, match="there is no curve 'los'; did you mean 'loss'"):
        History(run).plot(names=["los"])


def test_a_folder_without_numbers_says_what_to_do(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(InputError, match="no such folder; did you mean 'run'"):
        History(tmp_path / "rum").plot()
    (run / "metrics.jsonl").unlink()
    (run / "eval.jsonl").unlink()
    with pytest.raises(InputError, match=r"has no curves: no step is in its metrics\.jsonl; train with observer jsonl"):
        History(run).plot()


def test_a_picture_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    picture, file = History(make_run(tmp_path / "run")).plot(), tmp_path / "curves.svg"
    for _ in range(2):
        picture.save(file)
    assert file.read_text() == picture.svg
    file.write_text("mine")
    with pytest.raises(InputError, match="exists"):
        picture.save(file)
    picture.save(str(file), overwrite=True)
    assert file.read_text() == picture.svg
    with pytest.raises(InputError, match="cannot be written"):
        picture.save(tmp_path)
