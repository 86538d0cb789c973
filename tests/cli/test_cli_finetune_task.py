"""A task is trained with several seeds, each in a folder of its own; the first that fails ends it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_run_cli.commands.finetune_task import repeat


def training(losses: dict[str, float], tried: list[str]) -> Callable[..., int]:
    """A training that ends with the loss of its seed, or fails where it has none."""

    def start(seed: str, folder: str) -> int:
        tried.append(seed)
        if seed not in losses:
            return 7
        home = Path(folder.removeprefix("run.folder="))
        home.mkdir(parents=True)
        ended = {"split": "validation", "loss": losses[seed], "extra": {"accuracy": 1 - losses[seed]}}
        lines = ({**ended, "loss": 9.0}, ended, {**ended, "split": "test", "loss": 8.0})
        (home / "eval.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return 0

    return start


def test_every_metric_is_printed_with_its_median(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tried: list[str] = []
    losses = {"train.seed=5": 0.5, "train.seed=6": 0.125, "train.seed=7": 0.25}
    words = ("train.seed=5", f"run.folder={tmp_path / 'tuned'}", "train.lr=1e-5")
    assert repeat(training(losses, tried), 3, words, quiet=True) == 0
    assert tried == [*losses]
    assert sorted(path.name for path in (tmp_path / "tuned").iterdir()) == ["seed-5", "seed-6", "seed-7"]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [["loss", "0.25", "0.125", "0.5"], ["accuracy", "0.75", "0.5", "0.875"]]


def test_the_first_seed_that_fails_ends_it_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tried: list[str] = []
    assert repeat(training({"train.seed=1234": 0.5}, tried), 3, (), quiet=False) == 7
    assert tried == ["train.seed=1234", "train.seed=1235"]
    out, err = capsys.readouterr()
    assert (out, err) == ("", "megatron-run: seed 1234: loss 0.5, accuracy 0.5\n")
