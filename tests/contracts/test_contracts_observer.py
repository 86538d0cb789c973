"""The suite of kind observer notices one that breaks the contract."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_run.contracts import EvalMetrics, Observer, RunSummary, StepMetrics
from megatron_run.testing.observer import Make, observer_checks
from tests.support.conformance import failures


class NeedsALoss(Observer):
    def on_step_end(self, metrics: StepMetrics) -> None:
        assert metrics.loss is not None, "no loss"


class NeedsAStep(Observer):
    steps = 0

    def on_step_end(self, metrics: StepMetrics) -> None:
        self.steps += 1

    def on_train_end(self, reason: str) -> None:
        1 / self.steps  # fails without a step


class NeedsAFiniteLoss(Observer):
    def on_eval_end(self, metrics: EvalMetrics) -> None:
        int(metrics.loss)


class Overwrites(Observer):
    folder = Path()

    def on_train_start(self, run: RunSummary) -> None:
        (run.folder / "best.txt").write_text(str(run.attempt))


class Draws(Observer):
    def on_step_end(self, metrics: StepMetrics) -> None:
        random.random()


def test_an_observer_that_does_nothing_conforms() -> None:
    assert failures(observer_checks(Observer)) == {}


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (NeedsALoss, "it bears a run that fails", "no loss"),
        (NeedsAStep, "it bears a run of no steps", "ZeroDivisionError"),
        (NeedsAFiniteLoss, "it bears a whole run", "OverflowError"),
        (Overwrites, "what an attempt wrote outlives the next", "changed what the first wrote to best.txt"),
        (Draws, "it draws no random numbers", "moved a global random generator"),
    ],
)
def test_the_suite_notices_a_broken_observer(make: Make, name: str, message: str) -> None:
    assert message in failures(observer_checks(make))[name]
