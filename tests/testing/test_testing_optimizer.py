"""The optimizer suite passes what trains and resumes: any update rule that the built-in optimizer can run."""

from __future__ import annotations

import pytest

from megatron_run.contracts import Optimizer
from megatron_run_engine.builtin.optimizer.adamw import megatron_run_create_optimizer
from megatron_run_engine.optim import UpdateOptions
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing.optimizer import optimizer_checks
from tests.contracts.conformance import failures
from tests.support.checkout import ROOT

#: Rules that PyTorch gives no state before their first step, a rule that it does, and one that keeps none at all.
RULES = (
    f"{ROOT / 'tests' / 'examples' / 'rules' / 'lion.py'}:Lion",
    *("torch.optim:RMSprop", "torch.optim:Adagrad", "torch.optim:NAdam", "torch.optim:SGD"),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.rpartition(":")[2])
def test_a_rule_that_is_imported_conforms(rule: str) -> None:
    def create(context: BuildContext) -> Optimizer:
        return megatron_run_create_optimizer(context, UpdateOptions(rule=rule))

    assert failures(optimizer_checks(create, ranks=(1,))) == {}
