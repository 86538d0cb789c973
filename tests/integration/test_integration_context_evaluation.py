"""Evaluations of a training whose samples are split: tasks read texts of any length, and every rank has all scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode, RunError
from tests.support.forked import run_forked

pytestmark = pytest.mark.multiproc

TEXT = "The ring carries keys and values from rank to rank. " * 30
SPLITS = {
    "one": (),
    "context": ("parallel.context=2",),
    # Twice two pieces, each in two shards: 24 tokens are no multiple of 16.
    "context, sequence": ("parallel.context=2", "parallel.tensor=2", "parallel.sequence=true"),
}


def evaluated(folder: Path, name: str, *sets: str) -> list[tuple[str, float, int]]:
    """Split, loss and tokens of each evaluation of a run of one step."""
    text = folder / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    layers = "tensor+context" if "sequence" in name else "dense+context"
    config = {
        "run": {"folder": str(folder / name)},
        "train": {"steps": 1, "sequence_length": 24, "global_batch_size": 2, "micro_batch_size": 1},
        "model": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "dropout": 0.0},
        "data": {"use": "text", "paths": [str(text)]},
        "eval": {"interval": 1, "batches": 1, "tasks": [f"perplexity={text}"]},
        "observer": ["jsonl"],
    }
    plugins = () if name == "one" else (f"parallel-layer={layers}",)
    ran = run_forked(Request(configs=(config,), sets=(*SPLITS[name], *sets), plugins=plugins))
    if ran.code != ExitCode.DONE:
        raise RunError(ran.message)
    lines = (folder / name / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    return [(each["split"], each["loss"], each["tokens"]) for each in map(json.loads, lines)]


def test_tasks_score_what_one_process_does(tmp_path: Path) -> None:
    expected = evaluated(tmp_path, "one")
    assert [split for split, *_ in expected] == ["validation", "perplexity"]
    for name in ("context", "context, sequence"):
        for found, alone in zip(evaluated(tmp_path, name), expected, strict=True):
            assert (found[0], found[2]) == (alone[0], alone[2])
            assert found[1] == pytest.approx(alone[1], abs=2e-6)


def test_texts_that_filling_would_turn_otherwise_are_refused(tmp_path: Path) -> None:
    factors = "1.0,1.0,1.0,1.0"
    scaling = (
        "model.position=rope",
        "model.rope.scaling=longrope",
        "model.rope.factor=2",
        "model.rope.original_length=15",
        f"model.rope.short_factors={factors}",
        f"model.rope.long_factors={factors.replace('1.0', '2.0')}",
    )
    with pytest.raises(RunError, match=r"texts of up to 15 tokens have other angles"):
        evaluated(tmp_path, "context", *scaling)
