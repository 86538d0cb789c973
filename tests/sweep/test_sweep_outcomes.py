"""How far runs are, from files that others may have made; the picture of it."""

from __future__ import annotations

import errno
import fcntl
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_run.errors import InputError
from megatron_run_engine.run_folder import FolderLock
from megatron_run_sweep.metric import Metric, read_metric
from megatron_run_sweep.outcomes import Outcome, outcomes, ranked
from megatron_run_sweep.picture import drawing
from megatron_run_sweep.record import Run, Sweep, run_name

LOSS = Metric("eval", "loss")


def fill(folder: Path, status: dict[str, Any] | None = None, **files: list[Any]) -> None:
    folder.mkdir(parents=True)
    if status is not None:
        (folder / "status.json").write_text(json.dumps(status))
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def sweep_of(*values: str, **ends: Any) -> Sweep:
    return Sweep(runs=tuple(Run(values={"train.lr": value}, **ends) for value in values))


def test_a_run_is_read_from_its_own_files(tmp_path: Path) -> None:
    fill(
        tmp_path / run_name(0),
        {"state": "finished", "step": 20},
        eval=[
            {"step": 10, "split": "validation", "loss": 3.0},
            {"step": 20, "split": "validation", "loss": 2.0, "extra": {"accuracy": 0.5}},
            {"step": 20, "split": "test", "loss": 9.0},
        ],
        metrics=[{"step": s, "loss": 5 - s, "tokens_per_s": 100.0 * s} for s in (1, 2, 3)],
    )
    (found,) = outcomes(sweep_of("1"), tmp_path, LOSS)
    assert (found.state, found.step, found.metric, found.rate) == ("finished", 20, 2.0, 200.0)
    for name, value in (("eval.accuracy", 0.5), ("accuracy", 0.5), ("train.loss", 2.0), ("train.nothing", None)):
        assert outcomes(sweep_of("1"), tmp_path, read_metric(name))[0].metric == value, name


def test_the_end_of_a_long_file_is_enough(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": float(step), "tokens_per_s": 1.0} for step in range(10_000)]
    fill(tmp_path / run_name(0), {"state": "running", "step": 9999}, metrics=lines)
    with (tmp_path / run_name(0) / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10000, "lo')
    (found,) = outcomes(sweep_of("1"), tmp_path, Metric("train", "loss"))
    assert found.metric == 9999.0


@pytest.mark.parametrize(
    ("status", "exit_code", "state"),
    [
        (None, None, "waiting"),
        (None, 5, "failed"),
        ({"state": "running"}, None, "killed"),
        ({"state": "starting"}, None, "killed"),
        ({"state": "stopped"}, 75, "stopped"),
        ({"state": "failed"}, 6, "failed"),
        ({"state": "nonsense"}, None, "waiting"),
        ({"state": ["failed"]}, None, "waiting"),
    ],
)
def test_states(tmp_path: Path, status: dict[str, Any] | None, exit_code: int | None, state: str) -> None:
    fill(tmp_path / run_name(0), status)
    assert outcomes(sweep_of("1", exit_code=exit_code), tmp_path, LOSS)[0].state == state


def test_a_run_whose_lock_is_held_runs(tmp_path: Path) -> None:
    fill(tmp_path / run_name(0), {"state": "running", "step": 3})
    with (tmp_path / run_name(0) / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert outcomes(sweep_of("1"), tmp_path, LOSS)[0].state == "running"
    assert outcomes(sweep_of("1"), tmp_path, LOSS)[0].state == "killed"


def test_without_flock_a_run_runs_while_the_file_is_there_that_stands_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    fill(tmp_path / run_name(0), {"state": "running", "step": 3})
    with FolderLock(tmp_path / run_name(0)):
        assert outcomes(sweep_of("1"), tmp_path, LOSS)[0].state == "running"
    assert outcomes(sweep_of("1"), tmp_path, LOSS)[0].state == "killed"


def test_an_end_is_told_by_the_run_itself_or_else_by_the_sweep(tmp_path: Path) -> None:
    """The commands of a Slurm array are started by no sweep."""
    fill(tmp_path / run_name(0), {"state": "failed", "exit_code": 6, "message": "a guard"})
    fill(tmp_path / run_name(1), {"state": "running", "exit_code": None, "message": ""})
    sweep = Sweep(runs=(Run(values={}), Run(values={}, exit_code=4, message="killed by SIGKILL")))
    found = outcomes(sweep, tmp_path, LOSS)
    assert [(each.state, each.exit_code, each.message) for each in found] == [
        ("failed", 6, "a guard"),
        ("killed", 4, "killed by SIGKILL"),
    ]


@pytest.mark.parametrize(
    "line",
    [{"loss": "x"}, {"loss": True}, {"loss": None}, {"loss": float("nan")}, {"loss": 10**400}, {"extra": 3}, [1], "x"],
)
def test_what_is_no_number_is_none(tmp_path: Path, line: Any) -> None:
    fill(tmp_path / run_name(0), {"state": "finished", "step": "many"}, eval=[line], metrics=[line])
    (found,) = outcomes(sweep_of("1"), tmp_path, LOSS)
    assert (found.step, found.metric, found.rate) == (0, None, None)


def test_a_link_out_of_a_run_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"loss": 1.0}\n')
    fill(tmp_path / run_name(0), {"state": "finished"})
    (tmp_path / run_name(0) / "eval.jsonl").symlink_to(tmp_path / "secret")
    assert outcomes(sweep_of("1"), tmp_path, LOSS)[0].metric is None


def outcome(index: int, metric: float | None, **values: str) -> Outcome:
    return Outcome(run_name(index), values, "finished", 1, metric, None)


def test_the_best_comes_first_and_those_without_a_number_last() -> None:
    found = [outcome(0, None), outcome(1, 3.0), outcome(2, 1.0), outcome(3, 2.0)]
    assert [each.metric for each in ranked(found, maximize=False)] == [1.0, 2.0, 3.0, None]
    assert [each.metric for each in ranked(found, maximize=True)] == [3.0, 2.0, 1.0, None]


def test_a_run_that_failed_is_never_the_best() -> None:
    found = [outcome(0, 2.0, x="1"), replace(outcome(1, 1.0, x="2"), state="failed"), outcome(2, 3.0, x="3")]
    assert [each.run for each in ranked(found, maximize=False)] == ["run-000", "run-002", "run-001"]
    assert len(points(drawing(found, "eval.loss", maximize=False))) == 2


def test_a_metric_has_a_name() -> None:
    assert [str(read_metric(text)) for text in ("loss", "eval.loss", "train.model/drop")] == [
        *("eval.loss", "eval.loss", "train.model/drop"),
    ]
    for text in ("", "eval.", "train."):
        with pytest.raises(InputError, match="is no metric"):
            read_metric(text)


@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [
        ("eval.los", "eval.los is not among what every line has, eval.loss, ", "did you mean eval.loss?"),
        ("eval.loss2", "eval.loss2 is not among ", "did you mean eval.loss?"),  # which a plugin may add
        ("perplexty", "eval.perplexty is not among ", "did you mean eval.perplexity?"),
        ("train.grad_nrm", "train.grad_nrm is not among what every line has, train.", "did you mean train.grad_norm?"),
    ],
)
def test_a_name_that_is_nearly_another_is_told(text: str, begin: str, end: str) -> None:
    doubt = read_metric(text).doubt
    assert doubt.startswith(begin)
    assert doubt.endswith(end)


@pytest.mark.parametrize(
    "text", ["eval.loss", "train.mfu", "accuracy", "eval.lm_loss", "train.losses", "train.model/aux"]
)
def test_of_any_other_name_nothing_is_told_before_a_run(text: str) -> None:
    assert not read_metric(text).doubt


def points(picture: str) -> list[tuple[str, str]]:
    """The style and the words of each point."""
    name = "{http://www.w3.org/2000/svg}"
    circles = ET.fromstring(picture).iter(f"{name}circle")
    return [(each.attrib["class"], each.findtext(f"{name}title", "")) for each in circles]


def test_each_axis_has_a_panel_with_a_point_a_run_and_the_best_in_another_colour() -> None:
    found = [
        outcome(i, metric, lr=lr, use=use)
        for i, (lr, use, metric) in enumerate([("1e-4", "a", 3.0), ("1e-2", "a", 1.0), ("1e-2", "b", None)])
    ]
    shown = points(drawing(found, "eval.loss", maximize=False))
    assert len(shown) == 4
    assert len({style for style, _ in shown}) == 2
    best = [words for style, words in shown if "run-001" in words]
    assert best == ["run-001: eval.loss 1; lr=1e-2, use=a"] * 2


@pytest.mark.parametrize(
    "found",
    [
        [],
        [outcome(0, None, x="1")],
        [outcome(0, 1.0, x="1")],
        [outcome(0, 0.0, x="1"), outcome(1, 0.0, x="1.0")],
        [outcome(0, 1.0, x="<b>&"), outcome(1, 2.0, x="\x1b[2J\x00")],
        [outcome(0, 1.0, x="nan"), outcome(1, -1e300, x="1e999")],
        [outcome(i, float(i), **{f"k{j}": str(i * j) for j in range(7)}) for i in range(40)],
    ],
)
def test_every_sweep_is_a_picture(found: list[Outcome]) -> None:
    picture = drawing(found, "eval.<loss>", maximize=False)
    ET.fromstring(picture)
    assert "nan" not in picture.replace("=nan", "").replace(">nan<", "")
