"""Gradients that are read once for their norm, and multiplied by the update: the way of a GPU, here on a CPU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_run.contracts import Optimizer
from megatron_run_engine.builtin.optimizer.adamw import megatron_run_create_optimizer
from megatron_run_engine.optim import FlatOptimizer, Replicated, UpdateOptions, flat
from megatron_run_engine.optim.gradients import LateFactors, gradients_of
from megatron_run_engine.optim.update_rules import UpdateRule
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_testing import Check
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.optimizer import optimizer_checks
from megatron_run_testing.optimizer.bench import Bench, gradients

RULES = ("adamw", "adam", "sgd", "muon")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to make all optimizers that are attached from then on collect factors."""
    return lambda: monkeypatch.setattr(flat, "gradients_of", LateFactors)


def create(context: BuildContext, options: UpdateOptions | None = None) -> Optimizer:
    return megatron_run_create_optimizer(context, options or UpdateOptions())


def trained(rule: str) -> Bench:
    """After three steps of gradients of 8 times their size, of which the first and the last are clipped."""
    options = UpdateOptions(rule=rule)
    bench = Bench(lambda context: create(context, options), single_process_context(dtype=torch.bfloat16))
    for step, max_norm in enumerate((0.5, 1e3, 0.25)):
        bench.reduce(*(8 * each for each in gradients(step)))
        assert not bench.optimizer.unscale_(bench.one / 8).item()
        bench.optimizer.clip_(max_norm)
        bench.update(0.01, 0.1)
    return bench


def masters(bench: Bench) -> dict[tuple[str, str], torch.Tensor]:
    return {(piece.name, piece.field): piece.tensor.clone() for piece in bench.optimizer.iter_state()}


@pytest.mark.parametrize("rule", RULES)
def test_steps_give_what_multiplied_gradients_give(rule: str, late: Callable[[], None]) -> None:
    at_once = trained(rule)
    late()
    collected = trained(rule)
    assert isinstance(collected.optimizer, FlatOptimizer)
    assert isinstance(collected.optimizer._gradients, LateFactors)
    expected = masters(at_once)
    for key, found in masters(collected).items():
        # Muon's products are in bf16, where a rounding of a gradient may grow.
        tolerance = 2e-3 if rule == "muon" else 1e-6
        torch.testing.assert_close(found, expected[key], rtol=tolerance, atol=tolerance * 1e-2)


def test_the_factor_of_a_step_is_that_of_no_other(late: Callable[[], None]) -> None:
    """The second step multiplies by nothing."""

    def stepped() -> Bench:
        bench = Bench(create, single_process_context(dtype=torch.bfloat16))
        bench.reduce(*gradients(0))
        bench.optimizer.unscale_(bench.one / 8)
        bench.update(0.01, 0.1)
        bench.reduce(*gradients(1))
        bench.update(0.01, 0.1)
        return bench

    expected = masters(stepped())
    late()
    for key, found in masters(stepped()).items():
        torch.testing.assert_close(found, expected[key], rtol=1e-6, atol=1e-8)


def test_after_an_update_nothing_is_left_to_multiply_by(late: Callable[[], None]) -> None:
    late()
    bench = Bench(create, single_process_context(dtype=torch.bfloat16))
    bench.reduce(*gradients(0))
    bench.optimizer.unscale_(bench.one / 8)
    bench.optimizer.clip_(0.25)
    bench.update(0.01, 0.1)
    bench.optimizer.count_zeros()
    assert bench.optimizer.clip_(0.0).item() == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize("check", optimizer_checks(create, ranks=(1,)), ids=lambda check: check.name)
def test_the_contract_holds(check: Check, late: Callable[[], None]) -> None:
    late()
    check.run()


class Ops(TorchDispatchMode):
    """Counts operations on the memory of ``tensor``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage, self.seen = tensor.untyped_storage().data_ptr(), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat_args, _ = torch.utils._pytree.tree_flatten((args, kwargs))
        touched = (x for x in flat_args if isinstance(x, torch.Tensor))
        if any(x.untyped_storage().data_ptr() == self._storage for x in touched) and "view" not in str(func):
            self.seen[str(func.overloadpacket).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_reads_the_gradients_twice(late: Callable[[], None]) -> None:
    late()
    bench = Bench(create, single_process_context(dtype=torch.bfloat16))
    bench.step(gradients(0), max_norm=0.5)  # makes the state
    with Ops(main_grad(bench.weight)) as ops:
        bench.optimizer.finish_grad_sync()
        bench.optimizer.unscale_(bench.one / 8)
        bench.optimizer.clip_(0.5)
        bench.optimizer.step(0.01, 0.1)
        bench.optimizer.zero_grad()
    # One update of what decays and one of what does not, which are halves of the same memory.
    assert ops.seen == {"_foreach_norm": 1, "_fused_adamw_": 2, "_foreach_zero_": 1}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("owned", [range(0), range(64), range(64, 128)])
def test_a_value_that_another_rank_counts_is_looked_at_too(
    value: float, owned: range, late: Callable[[], None]
) -> None:
    late()
    optimizer = create(single_process_context(dtype=torch.float32))
    bench = Bench(lambda _: optimizer)
    (shard,) = optimizer._shards  # type: ignore[attr-defined]
    shard.owned = owned
    found = LateFactors([shard], torch.device("cpu"))
    assert not found.unscale_(bench.one).item()
    assert sum(map(len, [*shard.counted(), *shard.not_counted()])) == len(shard.grads)
    shard.grads[70] = value
    found.arrived()
    assert found.unscale_(bench.one).item() == 1.0


def test_the_largest_values_of_fp32_are_finite() -> None:
    bench = Bench(lambda context: FlatOptimizer(context, UpdateOptions(), Replicated))
    (shard,) = bench.optimizer._shards  # type: ignore[attr-defined]
    shard.grads.fill_(torch.finfo(torch.float32).max)
    found = LateFactors([shard], torch.device("cpu"))
    assert not found.unscale_(bench.one).item()
    assert found.sum_of_squares().item() == pytest.approx(len(shard.grads) * torch.finfo(torch.float32).max ** 2)


def test_a_rule_that_derives_from_torchs_has_its_gradients_multiplied() -> None:
    """Its own step may read them, and torch's constructor has stored ``fused`` for it."""
    for imported, divides in (("", True), ("rules:Derived", False)):
        rule = UpdateRule(torch.optim.AdamW, {"fused": True}, imported=imported)
        made = rule.make([{"params": [torch.zeros(2, requires_grad=True)]}], torch.device("cpu"))
        assert rule.divides(made) is divides


def test_a_cpu_multiplies_at_once() -> None:
    assert gradients_of([], torch.device("cpu")).factor is None
    assert isinstance(gradients_of([], torch.device("cuda")), LateFactors)
