"""Every update rule against its formula in float64, or against PyTorch's class on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from megatron_run.contracts import Optimizer
from megatron_run.errors import InputError
from megatron_run.planning import load_config
from megatron_run_engine.builtin.optimizer.adamw import megatron_run_create_optimizer
from megatron_run_engine.optim import UpdateOptions
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.optimizer import Bench
from tests.support.checkout import ROOT
from tests.support.resolving import mistake, resolved

LION = ROOT / "tests" / "examples" / "rules" / "lion.py"
Array = NDArray[np.float64]
#: (value, gradient, rate, decay), step by step.
Formula = Callable[[int, Array, Array, float, float], Array]


def bench(dtype: torch.dtype = torch.float64, **options: Any) -> Bench:
    def create(context: BuildContext) -> Optimizer:
        return megatron_run_create_optimizer(context, UpdateOptions(**options))

    return Bench(create, single_process_context(dtype=dtype))


def random_gradients(step: int, like: Bench) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    weight, bias = (torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in (like.weight, like.bias))
    return weight, bias


class AdamW:
    """Loshchilov and Hutter 2019, algorithm 2: bias-corrected moments, decoupled decay."""

    decoupled = True

    def __init__(self) -> None:
        self.first: Array | float = 0.0
        self.second: Array | float = 0.0

    def __call__(self, step: int, value: Array, gradient: Array, rate: float, decay: float) -> Array:
        if not self.decoupled:
            gradient, decay = gradient + decay * value, 0.0
        self.first = 0.8 * self.first + 0.2 * gradient
        self.second = 0.95 * self.second + 0.05 * gradient**2
        direction = (self.first / (1 - 0.8**step)) / (np.sqrt(self.second / (1 - 0.95**step)) + 1e-6)
        return np.asarray(value * (1 - rate * decay) - rate * direction)


class Adam(AdamW):
    """Kingma and Ba 2015, algorithm 1, with decay as part of the gradient."""

    decoupled = False


class Sgd:
    """Sutskever et al. 2013 as PyTorch has it: the velocity is not scaled by the rate."""

    def __init__(self, momentum: float = 0.0, nesterov: bool = False) -> None:
        self.momentum, self.nesterov, self.velocity = momentum, nesterov, np.zeros(())

    def __call__(self, step: int, value: Array, gradient: Array, rate: float, decay: float) -> Array:
        gradient = gradient + decay * value
        self.velocity = self.momentum * self.velocity + gradient
        return np.asarray(value - rate * (gradient + self.momentum * self.velocity if self.nesterov else self.velocity))


MOMENTS = {"betas": (0.8, 0.95), "eps": 1e-6}
RULES: dict[str, tuple[dict[str, Any], Callable[[], Formula]]] = {
    "adamw": (MOMENTS, AdamW),
    "adam": ({"rule": "adam", **MOMENTS}, Adam),
    "sgd": ({"rule": "sgd"}, Sgd),
    "momentum": ({"rule": "sgd", "momentum": 0.9}, lambda: Sgd(0.9)),
    "nesterov": ({"rule": "sgd", "momentum": 0.9, "nesterov": True}, lambda: Sgd(0.9, nesterov=True)),
}


@pytest.mark.parametrize("name", RULES)
def test_updates_are_those_of_the_rule_written_out(name: str) -> None:
    options, formula = RULES[name]
    mine = bench(**options, lr_mult=("*bias:0.5",))
    expected = {key: value.numpy() for key, value in mine.values().items()}
    rules = {key: formula() for key in expected}
    for step in range(1, 11):
        rate, decay = 0.1 / step, 0.3
        weight, bias = random_gradients(step, mine)
        mine.reduce(weight, bias)
        mine.update(rate, decay)
        expected["weight"] = rules["weight"](step, expected["weight"], weight.numpy(), rate, decay)
        expected["bias"] = rules["bias"](step, expected["bias"], bias.numpy(), 0.5 * rate, 0.0)
    for key, value in mine.values().items():
        np.testing.assert_allclose(value.numpy(), expected[key], rtol=1e-9, atol=1e-12)


def whole(kind: type[torch.optim.Optimizer], tensors: dict[str, Tensor], **arguments: Any) -> Iterator[None]:
    """Train ``tensors`` with a class of PyTorch's; one step at each ``next``."""
    sample = bench()
    optimizer = kind([{"params": [tensor]} for tensor in tensors.values()], **arguments)
    for step in range(1, 6):
        gradients = dict(zip(("weight", "bias"), random_gradients(step, sample), strict=True))
        for group, name in zip(optimizer.param_groups, tensors, strict=True):
            tensors[name].grad = gradients[name].to(tensors[name].dtype)
            group["lr"], group["weight_decay"] = 0.1 / step, 0.3 if name == "weight" else 0.0
        optimizer.step()
        yield


def test_muon_is_pytorchs_for_matrices_and_adamw_for_the_rest() -> None:
    mine = bench(torch.float32, rule="muon", momentum=0.9, rule_options={"adjust_lr_fn": "match_rms_adamw"})
    values = {name: value.requires_grad_() for name, value in mine.values().items()}
    muon = whole(torch.optim.Muon, {"weight": values["weight"]}, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = whole(torch.optim.AdamW, {"bias": values["bias"]}, fused=True)
    for step, _ in enumerate(zip(muon, adamw, strict=True), 1):
        weight, bias = random_gradients(step, mine)
        mine.reduce(weight, bias)
        mine.update(0.1 / step, 0.3)
    assert torch.equal(mine.weight, values["weight"])
    assert torch.equal(mine.bias, values["bias"])


def test_muon_leaves_matrices_to_adamw_by_their_names() -> None:
    left, plain = bench(torch.float32, rule="muon", adamw_for=("*",)), bench(torch.float32)
    for step in range(1, 4):
        for each in (left, plain):
            each.reduce(*random_gradients(step, each))
            each.update(0.1, 0.3)
    assert torch.equal(left.weight, plain.weight)


def test_any_class_of_pytorch_sees_whole_tensors_and_its_own_arguments() -> None:
    mine = bench(rule="torch.optim:Adafactor", rule_options={"beta2_decay": -0.5})
    values = {name: value.requires_grad_() for name, value in mine.values().items()}
    for step, _ in enumerate(whole(torch.optim.Adafactor, values, beta2_decay=-0.5), 1):
        mine.reduce(*random_gradients(step, mine))
        mine.update(0.1 / step, 0.3)
    assert torch.equal(mine.weight, values["weight"])
    assert torch.equal(mine.bias, values["bias"])
    fields = {piece.field: piece.sizes for piece in mine.optimizer.iter_state() if piece.tensor.numel() > 1}
    assert fields["row_var"] == (21, 1)


class Lion:
    """Chen et al. 2023, algorithm 2."""

    def __init__(self) -> None:
        self.momentum = np.zeros(())

    def __call__(self, step: int, value: Array, gradient: Array, rate: float, decay: float) -> Array:
        direction = np.sign(0.95 * self.momentum + 0.05 * gradient)
        self.momentum = 0.98 * self.momentum + 0.02 * gradient
        return np.asarray(value - rate * (direction + decay * value))


def test_a_rule_in_a_file_updates_as_its_paper_says() -> None:
    mine = bench(rule=f"{LION}:Lion", rule_options={"beta1": 0.95, "beta2": 0.98})
    expected, rules = {key: value.numpy() for key, value in mine.values().items()}, {"weight": Lion(), "bias": Lion()}
    for step in range(1, 11):
        gradients = dict(zip(("weight", "bias"), random_gradients(step, mine), strict=True))
        mine.reduce(*gradients.values())
        mine.update(0.1 / step, 0.3)
        for key, decay in (("weight", 0.3), ("bias", 0.0)):
            gradient = gradients[key].numpy()
            expected[key] = rules[key](step, expected[key], gradient, 0.1 / step, decay)
    for key, value in mine.values().items():
        np.testing.assert_allclose(value.numpy(), expected[key], rtol=1e-9, atol=1e-12)


def test_options_of_a_rule_are_a_mapping_on_the_command_line() -> None:
    run = load_config(
        "preset:tiny", sets=[f"optimizer.rule={LION}:Lion", "optimizer.rule_options={beta1: 0.95, beta2: 1e-1}"]
    )
    options = run.one("optimizer").options
    assert isinstance(options, UpdateOptions)
    assert options.rule_options == {"beta1": 0.95, "beta2": 0.1}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("./absent.py:Rule", "there is no file"),
        (str(LION), "names no class"),
        (f"{LION}:Lyon", "does not exist (from --set optimizer.rule); did you mean 'Lion'?"),
        ("torch.optim:AdamWW", "does not exist (from --set optimizer.rule); did you mean 'AdamW'?"),
        (
            "adanw",
            "'adanw' is not a rule; did you mean 'adamw'? the rules are adamw, adam, sgd, muon, MODULE:CLASS, or",
        ),
        ("torch.optim:", "is not a rule; the rules are adamw"),
        ("nowhere:Rule", "optimizer.rule=nowhere:Rule cannot be imported: there is no module 'nowhere'"),
        ("torch.optim:Nothing", "optimizer.rule=torch.optim:Nothing does not exist"),
        ("torch.nn:Linear", "optimizer.rule=torch.nn:Linear is not a torch.optim.Optimizer"),
    ],
)
def test_a_rule_that_is_none_is_refused_before_anything_is_started(rule: str, message: str) -> None:
    line, code = mistake(sets=[f"optimizer.rule={rule}"])
    assert message in line
    assert "--set optimizer.rule" in line
    assert code == 2


#: A rule of which nothing is known.
WHOLE = "torch.optim:Adafactor"


def test_a_rule_of_whole_matrices_is_refused_where_ranks_split_them() -> None:
    line, code = mistake(
        sets=[f"optimizer.rule={WHOLE}", "parallel.tensor=2", "parallel-layer.use=tensor", "model.num_heads=2"], nproc=2
    )
    assert f"optimizer.rule={WHOLE} updates whole matrices: parallel.tensor=2 cuts them" in line
    assert "choose adamw, adam, sgd or muon" in line
    assert code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rule": "sgd", "nesterov": True},
            r"SGD cannot be made with .*nesterov=True.*requires a momentum",
        ),
        ({"rule": "torch.optim:LBFGS"}, r"LBFGS cannot be made with nothing but parameters.*parameter groups"),
        ({"rule_options": {"speed": 3}}, r"rule=adamw has no 'speed'.* it has lr, betas"),
        (
            {"rule": "muon", "rule_options": {"ns_step": 3}},
            r"rule=muon has no 'ns_step'; did you mean 'ns_steps'\? it has lr, weight_decay, momentum, nesterov, ns",
        ),
    ],
)
def test_arguments_that_a_class_does_not_take_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench(**options)


@pytest.mark.parametrize(
    "options", [{"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"lr_mult": ("embedding",)}, {"lr_mult": ("a:-1",)}]
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        UpdateOptions(**options)


def test_the_last_pattern_that_matches_gives_the_factor() -> None:
    options = UpdateOptions(lr_mult=("*:0.1", "layers.*.weight:2", "layers.0.*:3"))
    assert [options.factor(name) for name in ("a", "layers.1.weight", "layers.0.weight")] == [0.1, 2.0, 3.0]
    assert UpdateOptions().factor("a") == 1.0


def test_an_option_that_the_rule_does_not_read_is_said() -> None:
    notice = "optimizer.momentum does nothing with rule=adamw: it is for sgd, muon"
    assert notice in resolved(sets=["optimizer.momentum=0.9"]).notices
    assert not resolved(sets=["optimizer.momentum=0.9", "optimizer.rule=sgd"]).notices


def test_what_takes_the_place_of_another_option_or_switches_off_what_a_rule_promises_is_said() -> None:
    config = {"optimizer": {"rule": "muon", "rule_options": {"nesterov": False, "momentum": 0.9}}}
    assert resolved("preset:tiny", config).notices == (
        "optimizer.rule_options: momentum=0.9 takes the place of optimizer.momentum=None",
        "optimizer.rule_options: nesterov=false switches off what rule=muon has without being asked",
    )


def test_what_every_step_overwrites_and_what_changes_nothing_is_said() -> None:
    overwritten = "optimizer.rule_options: lr does nothing: every step sets it from train.lr"
    config = {"optimizer": {"rule_options": {"lr": 0.1}}}
    assert overwritten in resolved("preset:tiny", config).notices
    unchanged = "optimizer.grad_dtype=param changes nothing: with train.precision=fp32 both types are fp32"
    assert unchanged in resolved(sets=["optimizer.grad_dtype=param"]).notices
    assert unchanged not in resolved(sets=["optimizer.grad_dtype=param", "train.precision=bf16"]).notices
