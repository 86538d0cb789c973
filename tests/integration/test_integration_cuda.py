"""A CUDA device trains what the CPU trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode
from megatron_run.planning import resolve
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.launch import train
from tests.support.saved_steps import read_all, same_state


def losses(folder: Path, device: str, *more: str) -> list[float]:
    """The losses of 20 steps of the toy preset on ``device``, with ``more`` settings."""
    sets = (f"run.folder={folder}", f"run.device={device}", "observer.use=jsonl", *more)
    run = resolve(Request(configs=("preset:tiny",), sets=sets))
    assert train(run).code is ExitCode.DONE
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.gpu
def test_losses_on_cuda_equal_those_on_the_cpu(tmp_path: Path) -> None:
    on_cpu, on_cuda = losses(tmp_path / "cpu", "cpu"), losses(tmp_path / "cuda", "cuda")
    assert len(on_cpu) == 20
    assert on_cuda == pytest.approx(on_cpu, rel=1e-4)


@pytest.mark.gpu
def test_what_is_saved_behind_the_training_has_the_bits_of_what_is_saved_at_once(tmp_path: Path) -> None:
    often = ("checkpoint.interval=3", "checkpoint.keep=9", "run.deterministic=true")
    at_once = losses(tmp_path / "at once", "cuda", *often)
    assert losses(tmp_path / "behind", "cuda", *often, "checkpoint.async_save=true") == at_once
    first, second = (Checkpoints(tmp_path / way / "checkpoints") for way in ("at once", "behind"))
    assert first.steps() == second.steps() == [3, 6, 9, 12, 15, 18, 20]
    assert all(same_state(read_all(first, step), read_all(second, step)) for step in first.steps())
