"""Learning rate and weight decay against the formulas, written out again point by point."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_run.errors import InputError
from megatron_run.planning.learning_rate import AnnealShape, DecayShape, LearningRate, Shape, WeightDecay

TOP, LOW, W, D = 1e-3, 1e-4, 100, 1000


def rate(shape: Shape, **more: Any) -> LearningRate:
    return LearningRate(maximum=TOP, minimum=LOW, shape=shape, warmup=W, decay=D, **more)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd", "inverse_sqrt"])
def test_warm_up_rises_in_a_line_to_the_maximum(shape: Shape) -> None:
    made = rate(shape, wsd=200)
    assert made.at(0) == 0
    assert made.at(25) == pytest.approx(TOP / 4)
    assert made.at(W) == TOP


def test_without_warm_up_the_first_step_has_the_maximum() -> None:
    assert LearningRate(TOP, LOW, "cosine", 0, D).at(0) == TOP


@pytest.mark.parametrize(
    ("shape", "samples", "expected"),
    [
        ("constant", 550, TOP),
        ("constant", 5000, TOP),
        ("linear", 325, LOW + 0.75 * (TOP - LOW)),
        ("linear", 1000, LOW),
        ("linear", 1001, LOW),
        ("cosine", 550, (TOP + LOW) / 2),
        ("cosine", 400, LOW + 0.75 * (TOP - LOW)),  # r = 1/3, cos 60 degrees = 1/2
        ("cosine", 1000, LOW),
        ("cosine", 9999, LOW),
        ("inverse_sqrt", 400, TOP / 2),
        ("inverse_sqrt", 1000, TOP * math.sqrt(0.1)),
        ("inverse_sqrt", 1001, LOW),
    ],
)
def test_shapes_after_the_warm_up(shape: Shape, samples: int, expected: float) -> None:
    assert rate(shape).at(samples) == pytest.approx(expected, rel=1e-12)


def test_inverse_square_root_stays_above_the_minimum() -> None:
    made = LearningRate(TOP, 9e-4, "inverse_sqrt", 0, 10**6)
    assert made.at(0) == TOP
    assert made.at(1) == TOP
    assert made.at(2) == 9e-4


@pytest.mark.parametrize(
    ("shape", "quarter"),
    [
        ("exponential", 2 * 2**-0.25 - 1),
        ("minus_sqrt", 0.5),
        ("linear", 0.75),
        ("cosine", (1 + math.sqrt(0.5)) / 2),
    ],
)
def test_wsd_is_stable_and_then_falls(shape: AnnealShape, quarter: float) -> None:
    made = rate("wsd", wsd=400, wsd_shape=shape)
    assert made.at(300) == TOP
    assert made.at(600) == TOP
    assert made.at(700) == pytest.approx(LOW + quarter * (TOP - LOW), rel=1e-12)
    assert made.at(1000) == pytest.approx(LOW)
    assert made.at(1001) == LOW


@pytest.mark.parametrize(("shape", "quarter"), [("linear", 0.25), ("cosine", 0.5 * (1 + math.cos(0.75 * math.pi)))])
def test_weight_decay_ramps_over_the_run(shape: DecayShape, quarter: float) -> None:
    made = WeightDecay(start=0.1, end=0.3, shape=shape, samples=1000)
    assert made.at(0) == pytest.approx(0.1)
    assert made.at(250) == pytest.approx(0.1 + 0.2 * quarter, rel=1e-12)
    assert made.at(1000) == pytest.approx(0.3)
    assert made.at(2000) == 0.3


def test_constant_weight_decay_is_constant_and_refuses_another_end() -> None:
    assert WeightDecay(0.1, 0.1, "constant", 10).at(5) == 0.1
    with pytest.raises(InputError, match=r"weight_decay_end=0.2 differs .*set train.weight_decay_shape"):
        WeightDecay(0.1, 0.2, "constant", 10)


def test_a_warm_up_as_long_as_the_decay_is_refused_unless_constant() -> None:
    with pytest.raises(InputError, match=r"train.lr_warmup is 10 samples, train.lr_decay 10"):
        LearningRate(TOP, LOW, "linear", 10, 10)
    assert LearningRate(TOP, LOW, "constant", 10, 10).at(11) == TOP


def section(**more: Any) -> Any:
    def span(share: float) -> Any:
        return SimpleNamespace(samples=lambda total, batch: int(total * share))

    values = {
        "steps": 100, "samples": None, "global_batch_size": 8, "ramp_up": None, "lr": TOP, "min_lr": LOW,
        "lr_shape": "cosine", "lr_warmup": span(0.01), "lr_decay": span(1), "lr_wsd": span(0.1),
        "lr_wsd_shape": "linear", "weight_decay": 0.01, "weight_decay_end": None, "weight_decay_shape": "constant",
    }  # fmt: skip
    return SimpleNamespace(**{**values, **more})


def test_from_config_counts_in_samples() -> None:
    assert LearningRate.from_config(section()) == LearningRate(TOP, LOW, "cosine", 8, 800, 80, "linear")
    ramp_up = SimpleNamespace(start=4, increment=4, samples=8)
    assert LearningRate.from_config(section(ramp_up=ramp_up)).decay == 2 * 4 + 98 * 8


def test_weight_decay_from_config() -> None:
    assert WeightDecay.from_config(section()) == WeightDecay(0.01, 0.01, "constant", 800)
    ramp = section(weight_decay_end=0.1, weight_decay_shape="linear")
    assert WeightDecay.from_config(ramp) == WeightDecay(0.01, 0.1, "linear", 800)
