from __future__ import annotations

import pytest
import torch

from megatron_run.contracts import BuildContext, Optimizer
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run.testing.check import Check, CheckFailed
from megatron_run.testing.optimizer import optimizer_checks

NAMES = [entry.name for entry in scan().entries if entry.kind == "optimizer"]


def make(name: str, context: BuildContext) -> Optimizer:
    made: Optimizer = load(choose(scan(), "optimizer", name, "test"), "test").create(context=context)
    return made


def checks(name: str) -> tuple[Check, ...]:
    return optimizer_checks(lambda context: make(name, context))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", range(len(checks("adamw"))), ids=[check.name for check in checks("adamw")])
def test_every_installed_optimizer_keeps_the_contract(name: str, index: int) -> None:
    checks(name)[index].run()


def test_an_optimizer_that_breaks_one_promise_fails_the_check_of_that_promise() -> None:
    def broken(context: BuildContext) -> Optimizer:
        optimizer = make("adamw", context)
        optimizer.clip_ = lambda max_norm: torch.ones(1)  # type: ignore[method-assign]  # broken on purpose
        return optimizer

    failed = []
    for check in optimizer_checks(broken):
        try:
            check.run()
        except CheckFailed as failure:
            failed.append((check.name, str(failure)))
    assert [name for name, _ in failed] == ["clip_ returns the norm and clips to it"]
    assert "the norm returned by clip_(0) is 1, expected 14.6629" in failed[0][1]
