"""The suite of kind observer notices one that breaks the contract."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_run.contracts import EvalMetrics, Observer, RunSummary, StepMetrics, StepTrace
from megatron_run_testing.observer import Make, observer_checks
from tests.contracts.conformance import failures


class NeedsALoss(Observer):
    def on_step_end(self, metrics: StepMetrics) -> None:
        assert metrics.loss is not None, "no loss"


class NeedsAStep(Observer):
    steps = 0

    def on_step_end(self, metrics: StepMetrics) -> None:
        self.steps += 1

    def on_train_end(self, reason: str) -> None:
        1 / self.steps  # fails without a step


class NeedsAStepToCome(Observer):
    def on_train_start(self, run: RunSummary) -> None:
        1 / (run.steps - run.first_step + 1)  # fails where nothing is left to do


class NeedsAFiniteLoss(Observer):
    def on_eval_end(self, metrics: EvalMetrics) -> None:
        int(metrics.loss)


class Overwrites(Observer):
    folder = Path()

    def on_train_start(self, run: RunSummary) -> None:
        (run.folder / "best.txt").write_text(str(run.attempt))


class CountsFromZero(Observer):
    def traced_steps(self) -> list[int]:
        return [0, 1]


class AsksForMoreEachTime(Observer):
    asked = 0

    def traced_steps(self) -> range:
        self.asked += 1
        return range(1, 1 + self.asked)


class DrawsNoTrace(Observer):
    def traced_steps(self) -> list[int]:
        return [2]

    def on_trace(self, trace: StepTrace) -> None:
        assert trace.ran.makespan <= trace.planned.makespan, "slower than planned"


class Misspelt(Observer):
    def on_stepend(self, metrics: StepMetrics) -> None:
        raise AssertionError(metrics)


class Draws(Observer):
    def on_step_end(self, metrics: StepMetrics) -> None:
        random.random()


def test_an_observer_that_does_nothing_conforms() -> None:
    assert failures(observer_checks(Observer)) == {}


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (NeedsALoss, "it survives a run that fails", "no loss"),
        (NeedsAStep, "it survives a run without steps", "ZeroDivisionError"),
        (NeedsAStepToCome, "it survives a run without steps", "at step 5 of 4: it raised ZeroDivisionError"),
        (NeedsAFiniteLoss, "it survives a whole run", "OverflowError"),
        (Overwrites, "a second attempt keeps what the first wrote", "changed what the first wrote to best.txt"),
        (CountsFromZero, "traced_steps returns step numbers", "traced_steps gave 0"),
        (AsksForMoreEachTime, "traced_steps returns step numbers", r"gave [1], and then [1, 2]"),
        (DrawsNoTrace, "it survives a whole run", "slower than planned"),
        (Misspelt, "its hooks are those of the contract", "on_stepend is never called; did you mean 'on_step_end'?"),
        (Draws, "it draws no random numbers", "moved a global random generator"),
    ],
)
def test_the_suite_notices_a_broken_observer(make: Make, name: str, message: str) -> None:
    assert message in failures(observer_checks(make))[name]
