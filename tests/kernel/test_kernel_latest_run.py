"""The file ``latest`` beside runs, which stands for one of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import pytest

from megatron_run.config.request import Request
from megatron_run.contracts.option_groups import OF_FILES, Group
from megatron_run.files.latest_run import LATEST_RUN, follow_latest, is_unnamed, point_latest_at
from megatron_run.planning import resolve
from megatron_run.planning.latest_runs import name_runs_in

OLD, NEW = "20261126-120000-00aa", "20261126-130000-00bb"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of two runs, of which ``latest`` names the newer one."""
    for name in (OLD, NEW):
        (tmp_path / "runs" / name).mkdir(parents=True)
        point_latest_at(tmp_path / "runs" / name)
    return tmp_path / "runs"


def test_it_stands_for_the_run_wherever_it_is_in_a_path(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    latest = runs / LATEST_RUN
    assert latest.read_text() == f"{NEW}\n", "for cat"
    assert follow_latest(latest) == runs / NEW
    assert follow_latest(latest / "checkpoints" / "step3") == runs / NEW / "checkpoints" / "step3"
    monkeypatch.chdir(runs)
    assert follow_latest(Path(LATEST_RUN)) == Path(NEW)
    for other in (runs, runs / NEW, runs / OLD / "config.yaml", Path("/"), Path()):
        assert follow_latest(other) == other


@pytest.mark.parametrize("text", ["", "step2000", "mine", f"../{OLD}", f"{OLD}/..", f"{OLD}\0", "\xff", "a" * 99])
def test_what_names_no_run_beside_it_stands_for_nothing(runs: Path, text: str) -> None:
    (runs / LATEST_RUN).write_text(text, encoding="latin-1")
    assert follow_latest(runs / LATEST_RUN) == runs / LATEST_RUN
    point_latest_at(runs / OLD)
    assert (runs / LATEST_RUN).read_text(encoding="latin-1") == text, "it is somebody else's"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
def test_something_else_of_that_name_is_left_alone(runs: Path, what: str) -> None:
    (runs / LATEST_RUN).unlink()
    make: dict[str, Callable[[Path], object]] = {
        "folder": Path.mkdir,
        "pipe": os.mkfifo,
        "link": lambda path: path.symlink_to("mine"),
    }
    make[what](runs / LATEST_RUN)
    before = (runs / LATEST_RUN).lstat()
    point_latest_at(runs / OLD)
    assert follow_latest(runs / LATEST_RUN) == runs / LATEST_RUN
    assert (runs / LATEST_RUN).lstat() == before


def test_the_link_of_an_early_version_becomes_a_file(runs: Path) -> None:
    (runs / LATEST_RUN).unlink()
    (runs / LATEST_RUN).symlink_to(OLD)
    point_latest_at(runs / NEW)
    assert not (runs / LATEST_RUN).is_symlink()
    assert follow_latest(runs / LATEST_RUN) == runs / NEW


def test_a_run_with_a_name_of_its_own_is_none_of_these() -> None:
    assert [is_unnamed(Path("runs") / name) for name in (OLD, "mine", LATEST_RUN, f"{OLD}x")] == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "named", ["run.folder=runs/latest", "run.init_from=runs/latest", "run.branch_from=runs/latest@3"]
)
def test_whoever_resolves_a_resolved_request_again_reads_of_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, steps in ((OLD, 3), (NEW, 4)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text(f"train: {{steps: {steps}}}\n")
    point_latest_at(tmp_path / "runs" / OLD)
    typed = Request(configs=("preset:tiny", "runs/latest/config.yaml"), sets=(named,))
    first = resolve(typed)
    point_latest_at(tmp_path / "runs" / NEW)
    again = resolve(replace(typed, latest=first.request.latest))
    assert again.config == first.config
    assert again.config.train.steps == 3
    assert resolve(typed).config.train.steps == 4


def test_files_of_the_latest_run_are_those_of_the_run_whatever_a_plugin_calls_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (OLD, NEW):
        (tmp_path / "runs" / name).mkdir(parents=True)
    point_latest_at(tmp_path / "runs" / OLD)
    paths = "data.paths=runs/latest/a.txt,latest/b.txt"
    typed = Request(("preset:tiny",), ("data.use=text", paths, "data.tokenizer=runs/latest/tokenizer.json"))
    first = resolve(typed, plan_only=True)
    options = first.config.data.options
    assert options["tokenizer"] == f"runs/{OLD}/tokenizer.json"
    assert options["paths"] == [f"runs/{OLD}/a.txt", "latest/b.txt"]
    point_latest_at(tmp_path / "runs" / NEW)
    again = resolve(replace(typed, latest=first.request.latest), plan_only=True)
    assert again.config.data == first.config.data


def test_a_path_in_a_group_is_followed_and_what_names_no_file_is_not(runs: Path) -> None:
    class Place(Group):
        folder: Path

    class Options(Group):
        place: Place
        file: Annotated[str | None, OF_FILES] = None
        text: str

    named = str(runs / LATEST_RUN / "x")
    options = Options(place=Place(folder=Path(named)), text=named)
    assert name_runs_in(options, {}) == options.model_copy(update={"place": Place(folder=runs / NEW / "x")})
