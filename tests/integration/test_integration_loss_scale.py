"""fp16 trains under a loss scale: the dynamic one walks down from where it starts, as the rules say it must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_run.errors import ExitCode
from megatron_run_engine.launch import train
from tests.plugins.scaler.loss_scale import LossScale
from tests.support.resolving import TINY, resolved

STEPS = 40


def metrics(folder: Path, **sets: Any) -> list[dict[str, Any]]:
    """What each of 40 steps of the toy preset reports."""
    fixed = {"run.folder": folder, "run.threads": 1, "train.steps": STEPS, "observer.use": "jsonl"}
    fixed |= {"model.num_layers": 2, "train.sequence_length": 16, "eval.interval": 0, "eval.batches": 1}
    fixed |= {"train.micro_batch_size": 8}  # all of a step's samples
    run = resolved(TINY, sets={**fixed, **{key.replace("__", "."): value for key, value in sets.items()}})
    assert train(run).code is ExitCode.DONE
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return [each["loss"] for each in metrics(tmp_path_factory.mktemp("fp32") / "run")]


def test_fp16_walks_down_from_two_to_the_32_and_then_trains(tmp_path: Path, fp32: list[float]) -> None:
    steps = metrics(tmp_path / "run", train__precision="fp16", scaler__loss_scale_window=8)
    skipped = [each["skipped"] for each in steps]
    rules = LossScale(2.0**32, 1.0, 8, 2, 2.0, 0.5)
    expected = [2.0**32, *(scale for scale, _, _ in rules.walk(skipped))]
    assert [each["loss_scale"] for each in steps] == expected[:-1]
    assert all(skipped[:8]), "gradients times 2^25 are beyond fp16"
    assert skipped.count(False) > STEPS / 2
    assert max(scale for scale, skip in zip(expected, skipped, strict=False) if not skip) < 2.0**25
    assert [each["grad_norm"] is None for each in steps] == skipped
    assert steps[-1]["loss"] < fp32[STEPS - 1 - skipped.count(True)] + 0.05, "it has lost the skipped steps, no more"


def test_bf16_follows_fp32_without_a_scale(tmp_path: Path, fp32: list[float]) -> None:
    steps = metrics(tmp_path / "run", train__precision="bf16")
    assert {(each["loss_scale"], each["skipped"]) for each in steps} == {(1.0, False)}
    losses = [each["loss"] for each in steps]
    assert losses != fp32
    assert losses == pytest.approx(fp32, abs=0.02)


def test_fp16_with_a_constant_scale_follows_fp32(tmp_path: Path, fp32: list[float]) -> None:
    steps = metrics(tmp_path / "run", train__precision="fp16", scaler__loss_scale=1024)
    assert {(each["loss_scale"], each["skipped"]) for each in steps} == {(1024.0, False)}
    assert [each["loss"] for each in steps] == pytest.approx(fp32, abs=0.01)
