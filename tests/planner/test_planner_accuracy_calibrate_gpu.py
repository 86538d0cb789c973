"""A GPU that is known, measured by a clock that computes what it would take: its description says the same again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.models import GPT
from benchmarks.single.ours import configuration
from megatron_run.config.request import Request
from megatron_run_cli.main import main
from megatron_run_engine.estimate.calibration.gpu_survey import (
    ATTENTION,
    FIRST,
    PRODUCTS,
    STEPS,
    SWEEPS,
    TRAININGS,
    survey_gpu,
)
from megatron_run_planner.accuracy.calibrate_gpu import GpuSurvey, describe_gpu
from megatron_run_planner.devices import Device, read_device
from tests.planner.surveyed_gpu import TRUE, StandIn, predicted


def described(alone: float = 1.0) -> Device:
    return describe_gpu(GpuSurvey(**survey_gpu(StandIn(alone), lambda _: None)), "found")


@pytest.mark.parametrize("alone", [1.0, 1.15])
def test_a_description_gives_back_what_was_measured(alone: float) -> None:
    """Where products are 15% faster alone than in a training, trainings tell."""
    found = described(alone)
    assert found.bandwidth * found.sweeps.efficiency == pytest.approx(TRUE.bandwidth * TRUE.sweeps.efficiency, rel=0.1)
    assert found.products.attention == pytest.approx(TRUE.products.attention, rel=0.01)
    assert found.host.layer == pytest.approx(TRUE.host.layer, rel=0.1)
    for size, shape in GPT.items():
        request = Request((configuration(shape, "bf16"),))
        assert predicted(request, found) == pytest.approx(predicted(request, TRUE), rel=0.03), size


def test_a_gpu_is_measured_within_a_minute() -> None:
    """At what an A100 reaches at least: 60% of its peak, 1.2 TB/s; with what a start and the first kernels cost."""
    rounds = 3 + 1 + 5  # calls before, one that tells how many a round has, and rounds
    flops = [2.0 * rows * columns * depth for rows, columns, depth in PRODUCTS]
    flops += [3.5 * 4 * b * heads * s**2 * size for b, heads, s, size in ATTENTION]
    operators = sum(rounds * max(0.01, each / 190e12) for each in flops) + sum(
        rounds * max(0.01, size / 1.2e12) for size in SWEEPS
    )
    trainings = sum((FIRST + STEPS + 1) * (each.flops / 190e12 + 0.1) + 4 for each in TRAININGS)
    assert operators + trainings + 15 < 60


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_real_gpu_is_measured(tmp_path: Path) -> None:
    """Times are those of a GPU that other tests use too: benchmarks.gpu compares them with trainings."""
    file = tmp_path / "here.yaml"
    assert main(["plan", "calibrate", "--device", "cuda", "--output", str(file)]) == 0
    found = read_device(str(file))
    assert 0 < found.products.efficiency <= 1
    assert predicted(TRAININGS[0].request(), found) > 0
