"""The suite of kind optimizer notices one that breaks the contract."""

from __future__ import annotations

import torch

from megatron_run.builtin.optimizer.adamw import megatron_run_create_optimizer
from megatron_run.contracts import BuildContext, Optimizer
from megatron_run.optim import UpdateOptions
from megatron_run.testing.optimizer import optimizer_checks
from tests.support.conformance import failures


def test_an_optimizer_that_breaks_one_promise_fails_the_check_of_that_promise() -> None:
    def broken(context: BuildContext) -> Optimizer:
        optimizer = megatron_run_create_optimizer(context, UpdateOptions())
        optimizer.clip_ = lambda max_norm: torch.ones(1)  # type: ignore[method-assign]  # broken on purpose
        return optimizer

    assert failures(optimizer_checks(broken)) == {
        "clip_ returns the norm and clips to it": "the norm returned by clip_(0) is 1, expected 14.6629",
        "a stage without parameters is no special case": "the norm of no gradients is 1, expected 0",
    }
