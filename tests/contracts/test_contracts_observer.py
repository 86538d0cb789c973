"""Every installed observer keeps the contract, and the suite notices one that does not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from megatron_run.contracts import EvalMetrics, Observer, RunSummary, StepMetrics
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run.testing.check import Check, CheckFailed
from megatron_run.testing.observer import Make, observer_checks


def installed() -> list[Any]:
    found = []
    for entry in scan().of_kind("observer"):
        make = load(entry, "the conformance suite").create
        found += [pytest.param(check, id=f"{entry.name}: {check.name}") for check in observer_checks(make)]
    return found


@pytest.mark.parametrize("check", installed())
def test_installed_observer_conforms(check: Check) -> None:
    check.run()


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


def outcomes(make: Make) -> dict[str, str]:
    found = {}
    for check in observer_checks(make):
        try:
            check.run()
        except CheckFailed as failure:
            found[check.name] = str(failure)
    return found


def test_an_observer_that_does_nothing_conforms() -> None:
    assert outcomes(Observer) == {}


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
    assert message in outcomes(make)[name]
