"""A rule of the user's goes on from a saved step as if it had not stopped, or its user is told that it may not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_run.contracts import MASTER, Optimizer
from megatron_run.errors import InputError
from megatron_run_engine.builtin.optimizer.adamw import megatron_run_create_optimizer
from megatron_run_engine.optim import UpdateOptions
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.optimizer.alone import shapes
from megatron_run_testing.optimizer.bench import Bench, SavedState, gradients


class Rule(torch.optim.Optimizer):
    """Steps by the sign of what ``direction`` makes of a gradient."""

    def __init__(self, groups: Any, **more: Any) -> None:
        super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0, **more})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the loss is computed already
        for group in self.param_groups:
            factor = self.factor(group)
            for parameter in group["params"]:
                direction = self.direction(self.state[parameter], parameter.grad)
                parameter.sub_(direction, alpha=group["lr"] * factor)

    def factor(self, group: dict[str, Any]) -> float:
        return 1.0

    def direction(self, state: dict[str, Any], gradient: Tensor) -> Tensor:
        return gradient.sign()


class Late(Rule):
    """Makes a moment, means of rows, a count and a number after its second step."""

    def direction(self, state: dict[str, Any], gradient: Tensor) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 2:
            state.setdefault("moment", torch.zeros_like(gradient)).lerp_(gradient, 0.1)
            state.setdefault("rows", torch.zeros(len(gradient))).add_(gradient.view(len(gradient), -1).mean(1))
            state["late"] = state.get("late", 0) + 1
            state["rate"] = state.get("rate", 0.1) / 3
            rows = state["rows"].view(-1, *[1] * (gradient.ndim - 1))
            direction: Tensor = gradient.mul(state["rate"]) + state["moment"] / state["late"] + rows
            return direction
        return gradient


class Nothing(Rule):
    """Makes no state at all in its first step."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, steps=0)

    def direction(self, state: dict[str, Any], gradient: Tensor) -> Tensor:
        self.param_groups[0]["steps"] += 1
        if self.param_groups[0]["steps"] > 3:
            state["moment"] = moment = torch.add(gradient, state.get("moment", 0.0), alpha=0.9)
            return moment
        return gradient


class Grouped(Rule):
    """Counts steps in its groups, and keeps a number, a tensor and one key there that its first step adds."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, k=0, best=0.1, norm=torch.zeros(()), warm=True, betas=(0.9, 0.99))

    def factor(self, group: dict[str, Any]) -> float:
        group["k"] += 1
        group["best"] = group["best"] / 3 + group["k"]
        group["norm"] += group["params"][0].grad.norm()
        group["warm"] = group["k"] < 3
        group["sum"] = group.get("sum", 0.5) + 1 / group["k"]
        return float(group["best"] + group["norm"] + group["sum"] + group["warm"])


class Attribute(Rule):
    """Counts in an attribute of its own."""

    k = 0

    def factor(self, group: dict[str, Any]) -> float:
        self.k += 1
        return 1 / self.k


class Texts(Rule):
    def direction(self, state: dict[str, Any], gradient: Tensor) -> Tensor:
        state["mode"] = "warm"
        return gradient


class History(Rule):
    def __init__(self, groups: Any) -> None:
        super().__init__(groups, norms=[])

    def factor(self, group: dict[str, Any]) -> float:
        group["norms"] = [*group["norms"], 1.0]
        return 1.0


class OfNothing(Rule):
    def factor(self, group: dict[str, Any]) -> float:
        self.state["all"]["k"] = 1  # type: ignore[index]  # that is its mistake
        return 1.0


class Wrapped(Rule):
    """Leaves its steps to another rule, which keeps the state."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.inner = torch.optim.AdamW(self.param_groups)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()


def bench(rule: type[Rule]) -> Bench:
    def create(context: BuildContext) -> Optimizer:
        return megatron_run_create_optimizer(context, UpdateOptions(rule=f"{__file__}:{rule.__name__}"))

    return Bench(create, single_process_context(dtype=torch.float32))


def train(each: Bench, *steps: int) -> None:
    for number in steps:
        each.step(gradients(number))


def same(one: Bench, other: Bench) -> bool:
    return all(map(torch.equal, one.values().values(), other.values().values()))


@pytest.mark.parametrize("rule", [Late, Nothing, Grouped])
@pytest.mark.parametrize("saved_at", [1, 4])
@pytest.mark.parametrize("before", [(), (7, 8, 9, 10, 11, 12)], ids=["anew", "gone back"])
def test_what_a_rule_makes_in_any_step_is_saved_and_loaded(
    rule: type[Rule], saved_at: int, before: tuple[int, ...]
) -> None:
    whole, resumed = bench(rule), bench(rule)
    train(whole, *range(saved_at))
    train(resumed, *before)
    resumed.optimizer.load_state(SavedState(whole.optimizer.iter_state(), shapes(whole)))
    for step in range(saved_at, 8):
        for each in (whole, resumed):
            train(each, step)
        assert same(whole, resumed), f"step {step}"
    kept = (
        SavedState(whole.optimizer.iter_state(), shapes(whole)),
        SavedState(resumed.optimizer.iter_state(), shapes(whole)),
    )
    assert all(torch.equal(kept[0].tensors[key], value) for key, value in kept[1].tensors.items())


def test_what_a_rule_changes_in_its_groups_is_saved_and_nothing_else_of_them() -> None:
    each = bench(Grouped)
    train(each, 0, 1, 2)
    fields = {piece.field for piece in each.optimizer.iter_state()}
    assert fields == {MASTER, "group.k", "group.best", "group.norm", "group.warm", "group.sum"}


@pytest.mark.parametrize("rule", [Late, Nothing, Grouped])
def test_weights_alone_leave_a_rule_as_before_its_first_step(rule: type[Rule]) -> None:
    fresh, trained = bench(rule), bench(rule)
    train(trained, *range(5))
    trained.optimizer.load_weights(SavedState(fresh.optimizer.iter_state(), shapes(fresh)))
    for each in (fresh, trained):
        train(each, *range(6))
    assert same(fresh, trained)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            Texts,
            r":Texts keeps mode in state, which cannot be saved: it is of type str, and a saved step holds tensors",
        ),
        (History, r":History keeps norms in param_groups, which cannot be saved: it is of type list"),
        (OfNothing, r":OfNothing keeps state\['all'\], which cannot be saved: it belongs to no parameter"),
    ],
)
def test_what_cannot_be_saved_is_refused_in_the_step_that_makes_it(rule: type[Rule], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(bench(rule), 0)


@pytest.mark.parametrize(("rule", "attribute"), [(Attribute, "k"), (Wrapped, "inner")])
def test_an_attribute_that_steps_change_is_told_once(
    rule: type[Rule], attribute: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "megatron_run_testing"):
        train(bench(rule), 0, 1, 2)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f":{rule.__name__}: steps change its attribute {attribute}, which is not saved" in line


@pytest.mark.parametrize("rule", [Late, Nothing, Grouped])
def test_a_rule_whose_every_number_is_saved_is_not_told_of(rule: type[Rule], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "megatron_run_testing"):
        train(bench(rule), *range(6))
    assert not caplog.records
