"""Fine-tuning: heads on split models, and the command from pretrained weights to medians of seeds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_run.config.request import Request
from megatron_run.registry.discover import Catalog, scan
from megatron_run_cli.commands import finetune_task
from megatron_run_cli.main import main
from megatron_run_engine.data.indexed_files import IndexedWriter
from tests.plugins.data.nlu import published
from tests.support.training import learned_alike, train_many

SPLIT = (
    *("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "parallel.data=1"),
    *("parallel-layer.use=tensor", "schedule.use=1f1b"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    published.vocabulary(folder / "vocab.txt")
    published.mnli(folder / "mnli")
    published.squad(folder / "squad2", "v2.0")
    published.race(folder / "race")
    return folder


def request(home: Path, task: str, nproc: int, *sets: str) -> Request:
    head = {
        "race": ("model.head=choice", "model.choices=4", "train.sequence_length=64"),
        "squad2": ("model.head=span",),
    }
    common = (
        *("model.use=bert", "data.use=nlu", f"data.task={task}", f"data.folder={home / task}"),
        *(f"data.tokenizer={home / 'vocab.txt'}", "train.steps=2", "eval.interval=2", "train.global_batch_size=4"),
    )
    return Request(("preset:tiny",), (*common, *head[task], *sets), (), nproc=nproc)


@pytest.mark.multiproc
def test_heads_on_a_split_model_train_and_answer_as_on_one_process(home: Path) -> None:
    tasks = ("race", "squad2")
    split = train_many(4, [request(home, task, 4, *SPLIT) for task in tasks], timeout=200)
    alone = train_many(1, [request(home, task, 1) for task in tasks], timeout=200)
    for found, expected in zip(split, alone, strict=True):
        learned_alike(found, expected[0])
        assert found[0].judged == expected[0].judged
        assert found[0].judged[0]


@pytest.mark.nightly  # five processes that import torch; test_cli_finetune_task has the seeds
def test_a_task_is_learned_from_pretrained_weights_with_seeds(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with IndexedWriter("books", np.uint16) as writer:
        generator = np.random.default_rng(0)
        for _ in range(40):
            writer.add(generator.integers(5, 20, 30))
            writer.end_document()
    small = ("train.steps=1", "eval.batches=1", "run.threads=1", "model.num_layers=1")
    data = ("data=sentence-pairs", "paths=books", f"tokenizer={home / 'vocab.txt'}", "split=8,1,1")
    pretrained = ["preset:tiny", "--plugin", "model=bert,head=pretraining", "--plugin", ",".join(data[:3])]
    sets = [word for key in (*small, "data.split=8,1,1", "run.folder=base") for word in ("--set", key)]
    assert main([*pretrained, *sets]) == 0
    capfd.readouterr()
    changes = ("train.samples=8", "train.global_batch_size=4", "train.micro_batch_size=2", "train.seed=5")
    words = [word for key in (*changes, "run.folder=tuned", "run.threads=1") for word in ("--set", key)]
    task = ("finetune", "base", "--task", "mnli", "--data", str(home / "mnli"))
    assert main([*task, *words, "--seeds", "3"]) == 0
    said = capfd.readouterr()
    assert "head.classes.weight" in said.out  # new beside the weights of the encoder
    assert "head.pooler.dense.weight" not in said.out
    found = []
    for seed in (5, 6, 7):
        lines = Path("tuned", f"seed-{seed}", "eval.jsonl").read_text().splitlines()
        found.append(json.loads(lines[-1])["extra"]["accuracy"])
    printed = next(line for line in said.out.splitlines() if line.startswith("accuracy "))
    assert [float(cell) for cell in printed.split()[1:]] == pytest.approx(
        [sorted(found)[1], min(found), max(found)], rel=1e-3
    )
    for typed, told in (
        ("mnli", "add --data FOLDER"),
        ("mnlu --data .", "data.task=mnlu: it must be 'mnli', 'qqp', 'squad1', 'squad2' or 'race' (from --task mnlu)"),
        ("mnli --data . --set data.stride=far", "data.stride=far: it must be a whole number (from --set data.stride)"),
    ):
        assert main(["finetune", "base", "--task", *typed.split()]) == 2
        assert told in capfd.readouterr().err
    lacking = Catalog(tuple(each for each in scan().entries if each.name != "nlu"))
    monkeypatch.setattr(finetune_task, "scan", lambda: lacking)
    assert main(["finetune", "base", "--task", "mnli", "--data", "."]) == 3
    assert "no installed plugin is data=nlu (from --task mnli); pip install" in capfd.readouterr().err
