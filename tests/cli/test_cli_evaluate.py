"""``megatron-run eval``: the same numbers on every topology, kept with the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_run.errors import ExitCode
from megatron_run_cli.main import main
from megatron_run_inference.commands import evaluate
from tests.support.forked import forked_command

pytestmark = pytest.mark.multiproc

TEXT = "the quick brown fox jumps over the lazy dog\n" * 7


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with experts, and a text beside it."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "text.txt").write_text(TEXT)
    sets = ("run.folder=run", "train.steps=3", "data.use=text", "data.paths=text.txt", "data.split=60,40,0")
    small = (
        "model.experts.count=2",
        "model.experts.capacity_factor=1.0",
        "train.micro_batch_size=1",
        "train.global_batch_size=1",
    )
    words = ("preset:tiny", *(word for each in (*sets, *small) for word in ("--set", each)))
    done = forked_command(words, folder)
    assert done.returncode == ExitCode.DONE, done.stderr
    return folder / "run"


def evaluated(run: Path, *words: str) -> list[dict[str, Any]]:
    done = forked_command(("eval", str(run), "--json", *words), run.parent)
    assert done.returncode == ExitCode.DONE, done.stderr
    tasks: list[dict[str, Any]] = json.loads(done.stdout)["tasks"]
    return tasks


TASKS = ("--task", "perplexity=text.txt", "--task", "lambada=text.txt", "--stride", "7", "--batch", "3")


@pytest.fixture(scope="module")
def alone(run: Path) -> list[dict[str, Any]]:
    return evaluated(run, *TASKS)


@pytest.mark.parametrize(
    "split",
    [
        ("parallel_layer.use=tensor", "parallel.tensor=2"),
        # test_integration_scoring scores by these by day, and experts are split over the latter
        *(pytest.param((each,), marks=pytest.mark.nightly) for each in ("parallel.pipeline=2", "parallel.data=2")),
        ("parallel.expert=2", "parallel.data=2"),
    ],
    ids=lambda split: split[-1] if len(split) < 2 else split[0],
)
def test_every_topology_gives_the_same_numbers(run: Path, alone: list[dict[str, Any]], split: tuple[str, ...]) -> None:
    found = evaluated(run, *TASKS, *(word for each in split for word in ("--set", each)))
    assert [each["tokens"] for each in found] == [each["tokens"] for each in alone]
    for one, other in zip(found, alone, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-6)
        assert one["metrics"] == {name: pytest.approx(value, rel=1e-5) for name, value in other["metrics"].items()}


def test_the_numbers_are_kept_with_the_run(run: Path, alone: list[dict[str, Any]]) -> None:
    before = EventAccumulator(str(run / "tensorboard")).Reload().Scalars("train/loss")
    lines = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["split"] == "lambada"]
    assert kept[0] == {
        "step": 3,
        "split": "lambada",
        "loss": alone[1]["loss"],
        "perplexity": pytest.approx(kept[0]["perplexity"]),
        "tokens": alone[1]["tokens"],
        "extra": alone[1]["metrics"],
    }
    curves = EventAccumulator(str(run / "tensorboard")).Reload()
    assert curves.Scalars("validation_lambada/accuracy")[0].step == 3
    assert curves.Scalars("train/loss") == before
    assert [point.step for point in before] == [1, 2, 3]


def test_a_split_of_data_that_have_changed_is_told(run: Path, tmp_path: Path) -> None:
    """Its numbers stand in eval.jsonl beside those of the text as it was."""
    copied = Path(shutil.copytree(run.parent, tmp_path / "copied")) / "run"
    (same,) = evaluated(copied, "--task", "perplexity=validation")
    with (copied.parent / "text.txt").open("a") as text:
        text.write("more")
    changed, file = evaluated(copied, "--task", "perplexity=validation", "--task", "perplexity=text.txt")
    assert (same["note"], file["note"]) == ("", "")
    assert changed["note"] == "the files of its data are not what they were at step 3: its splits are others too"


def test_overlap_needs_no_model(tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text("a b c d e f g h i")
    (tmp_path / "train.txt").write_text("x b c d e f g h i x")
    done = forked_command(("eval", "overlap", "test.txt", "train.txt"), tmp_path)
    assert done.stdout == "1 of 2 8-grams, 50.00%, occur in the training set\n"


def test_without_a_task_the_command_says_what_to_type(tmp_path: Path) -> None:
    done = forked_command(("eval", "run"), tmp_path)
    assert (done.returncode, done.stdout) == (ExitCode.INPUT, "")
    assert done.stderr == (
        "megatron-run: no task is given; type: --task perplexity=FILE, wikitext=FILE or lambada=FILE\n"
    )


@pytest.mark.parametrize(
    ("task", "meant"),
    [("perplexty=notes.md", "perplexity"), ("perplexity=validaton", "validation")],
)
def test_a_slip_in_a_task_is_answered_with_what_was_meant(
    task: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "run", "--task", task]) != 0
    assert f"did you mean '{meant}'?" in capsys.readouterr().err


def test_a_file_without_its_task_gets_the_words_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "run", "notes.md"]) == ExitCode.INPUT
    assert capsys.readouterr().err == ("megatron-run: notes.md follows the model; type: --task perplexity=notes.md\n")


def test_a_long_evaluation_says_how_far_it_is(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run), "--task", f"perplexity={run.parent / 'text.txt'}", "--json"]
    monkeypatch.chdir(run.parent)
    assert main(words) == ExitCode.DONE
    assert "windows" not in capsys.readouterr().err
    monkeypatch.setattr(evaluate, "_PAUSE", 0.0)
    assert main([*words, "--stride", "1", "--batch", "100"]) == ExitCode.DONE
    lines = [line for line in capsys.readouterr().err.splitlines() if "windows" in line]
    scored, windows = lines[0].split(": ")[-1].split(" of ")
    assert int(scored) == 100
    assert len(lines) == (int(windows.split()[0].replace(",", "")) - 1) // 100
