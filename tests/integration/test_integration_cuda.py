"""A CUDA device trains what the CPU trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode
from megatron_run.launch import train
from megatron_run.resolve import resolve


def losses(folder: Path, device: str) -> list[float]:
    """The losses of 20 steps of the toy preset on ``device``."""
    sets = (f"run.folder={folder}", f"run.device={device}", "observer.use=jsonl")
    run = resolve(Request(configs=("preset:tiny",), sets=sets))
    assert train(run).code is ExitCode.DONE
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.gpu
def test_losses_on_cuda_equal_those_on_the_cpu(tmp_path: Path) -> None:
    on_cpu, on_cuda = losses(tmp_path / "cpu", "cpu"), losses(tmp_path / "cuda", "cuda")
    assert len(on_cpu) == 20
    assert on_cuda == pytest.approx(on_cpu, rel=1e-4)
