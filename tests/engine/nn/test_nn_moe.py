"""Mixtures of experts against one written out token by token, in float64: losses, every gradient, what is reported."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn import Parameter

from megatron_run.config.values import nested
from megatron_run.contracts import Decoding
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing.build_contexts import example_microbatch, logical_values, single_process_context
from megatron_run_testing.model import Built, build_model
from tests.support import plain_gpt
from tests.support.plain_moe import Mixed

SMALL = {
    "num_layers": 2,
    "hidden_size": 12,
    "num_heads": 2,
    "vocab_size": 61,
    "dropout": 0.0,
    "init_std": 0.4,  # every path matters
    "experts.count": 4,
    "experts.ffn_size": 20,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one of three, by its probability": {"experts.count": 3, "experts.top_k": 1, "experts.router.pre_softmax": True},
    "all of them": {"experts.top_k": 4},
    "swiglu without bias": {"activation": "swiglu", "bias": False, "norm.kind": "rmsnorm"},
    "sigmoid": {"experts.router.score_function": "sigmoid", "experts.router.scaling_factor": 2.5},
    "one by sigmoid": {"experts.router.score_function": "sigmoid", "experts.top_k": 1},
    "sigmoids as they are": {"experts.router.score_function": "sigmoid", "experts.router.norm_weights": False},
    "groups": {"experts.count": 6, "experts.router.groups": 3, "experts.router.top_groups": 2, "experts.top_k": 3},
    "groups by their best expert": {
        "experts.count": 8,
        "experts.router.groups": 4,
        "experts.router.top_groups": 2,
        "experts.router.group_best": 1,
    },
    "biases": {"experts.router.bias_rate": 0.01, "experts.aux_loss_coeff": 0.0, "experts.router.pre_softmax": True},
    "all of DeepSeek-V3's": {
        "experts.count": 8,
        "experts.top_k": 3,
        "num_layers": 3,
        "experts.layer_first": 1,
        "experts.router.score_function": "sigmoid",
        "experts.router.groups": 4,
        "experts.router.top_groups": 2,
        "experts.router.bias_rate": 0.01,
        "experts.router.scaling_factor": 2.5,
        "experts.shared.ffn_size": 8,
    },
    "probabilities as they are": {"experts.router.pre_softmax": True},
    "z loss alone": {"experts.aux_loss_coeff": 0.0, "experts.z_loss_coeff": 0.5},
    "no auxiliary loss": {"experts.aux_loss_coeff": 0.0},
    "capacity": {"experts.capacity_factor": 0.75},
    "capacity by position": {"experts.capacity_factor": 0.75, "experts.drop_policy": "position", "experts.top_k": 3},
    "capacity that drops nothing": {"experts.capacity_factor": 4.0},
    "padded": {"experts.capacity_factor": 0.75, "experts.pad_to_capacity": True},
    "padded by position": {
        "experts.capacity_factor": 1.25,
        "experts.pad_to_capacity": True,
        "experts.drop_policy": "position",
        "experts.top_k": 3,
        "bias": False,
        "activation": "swiglu",
        "norm.kind": "rmsnorm",
    },
    "shared": {"experts.shared.ffn_size": 8},
    "shared with a gate": {"experts.shared.ffn_size": 8, "experts.shared.gate": True, "experts.z_loss_coeff": 0.1},
    "every second layer": {"num_layers": 3, "experts.layer_freq": 2},
    "a pattern": {"num_layers": 4, "experts.layer_pattern": (0, 1, 1)},
    "every second layer but the first ones": {"num_layers": 5, "experts.layer_freq": 2, "experts.layer_first": 1},
}
each_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())


def moe(variant: dict[str, Any], **train: Any) -> tuple[GptOptions, BuildContext, Built]:
    options = GptOptions.model_validate(nested({**SMALL, **variant}))
    context = single_process_context(options, train=train)
    built = build_model(lambda context, _: Gpt(context, options), context, options)
    for bias in biases(built).values():  # at first they are zero, and would choose nothing
        bias.data.copy_(torch.linspace(-0.2, 0.2, len(bias)))
    return options, context, built


def biases(built: Built) -> dict[str, Parameter]:
    found = built.infos.items()
    return {info.name: parameter for parameter, info in found if info.name.endswith("expert_bias")}


def reference(built: Built, options: GptOptions) -> tuple[torch.Tensor, plain_gpt.Weights, list[Mixed]]:
    """The language-model loss, the weights that it was computed from, and what each layer of experts found."""
    weights, mixed = plain_gpt.leaves(logical_values(built.infos)), list[Mixed]()
    tokens, labels, mask = (example_microbatch(61).fields[name] for name in ("tokens", "labels", "loss_mask"))
    return plain_gpt.loss(weights, tokens, labels, mask, options, mixed), weights, mixed


@each_variant
def test_losses_and_every_gradient_are_those_of_the_reference(variant: dict[str, Any]) -> None:
    options, _, built = moe(variant)
    lm, weights, mixed = reference(built, options)
    for found in mixed:
        lm = lm + options.experts.aux_loss_coeff * found.balance + options.experts.z_loss_coeff * found.z
    torch.autograd.backward(lm)
    loss, gradients = built.step(example_microbatch(61))
    torch.testing.assert_close(loss, lm.detach())
    assert gradients.keys() == weights.keys()
    for name, weight in weights.items():
        expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(gradients[name], expected, msg=f"the gradient of {name} differs")


@each_variant
def test_what_is_reported_is_what_the_reference_found(variant: dict[str, Any]) -> None:
    options, context, built = moe(variant)
    _, _, mixed = reference(built, options)
    out, _ = built.forward(example_microbatch(61))
    assert out.losses.keys() == set(built.model.metric_names)
    for name, coefficient, values in (
        ("model/balance_loss", options.experts.aux_loss_coeff, [found.balance for found in mixed]),
        ("model/z_loss", options.experts.z_loss_coeff, [found.z for found in mixed]),
    ):
        if coefficient:
            total, weight = out.losses[name]
            torch.testing.assert_close(total / weight, torch.stack(values).mean())
    means = context.metrics.means(context.metrics.collect(context.groups).tolist())
    assignments = 32 * options.experts.top_k * len(mixed)
    assert means["model/drop_rate"] == pytest.approx(sum(found.dropped for found in mixed) / assignments)
    assert 0 <= means["model/expert_load_min"] <= 1 <= means["model/expert_load_max"] <= options.experts.count


def test_the_variants_drop_some_tokens_and_leave_some_experts_alone() -> None:
    """Else half of the comparisons above would see nothing."""
    options, _, built = moe(VARIANTS["capacity"])
    assert sum(found.dropped for found in reference(built, options)[2]) > 4


@pytest.mark.parametrize("capacity", [0.25, 4.0])
def test_padded_experts_drop_no_token_of_a_text(capacity: float) -> None:
    """In generation every expert has as many slots as the fullest one needs."""
    example = replace(example_microbatch(61), train=False, decoding=Decoding())
    example = replace(example, fields={"tokens": example.fields["tokens"]})
    variants: tuple[dict[str, Any], ...] = ({}, {"experts.capacity_factor": capacity, "experts.pad_to_capacity": True})
    found = []
    for variant in variants:
        _, _, built = moe(variant)
        with torch.no_grad():
            found.append(built.forward(example)[0].logits)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        ({"experts.pad_to_capacity": True}, "there is nothing to pad to; set model.experts.capacity_factor"),
        (
            {"experts.pad_to_capacity": True, "experts.capacity_factor": 1.0, "experts.dispatcher": "allgather"},
            "allgather sends tokens",
        ),
    ],
)
def test_experts_that_cannot_be_padded_are_refused(sets: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        GptOptions.model_validate(nested({**SMALL, **sets}))


def test_a_bias_moves_by_the_rate_against_the_choices_of_a_step() -> None:
    variant = {**VARIANTS["all of DeepSeek-V3's"], "experts.layer_first": 2}
    options, _, built = moe(variant)
    ((name, bias),) = biases(built).items()
    assert name == "layers.2.moe.router.expert_bias"
    before, (found,) = bias.detach().clone(), reference(built, options)[2]
    built.forward(example_microbatch(61))
    built.forward(replace(example_microbatch(61), train=False))  # counts nothing
    built.model.before_update(skipped=False)
    mean = sum(found.load) / len(found.load)
    expected = [0.01 * ((load < mean) - (load > mean)) for load in found.load]
    assert len(set(expected)) > 1
    torch.testing.assert_close(bias.detach() - before, torch.tensor(expected, dtype=bias.dtype))


def test_a_skipped_step_moves_no_bias_and_is_forgotten() -> None:
    _, _, built = moe(VARIANTS["biases"])
    before = {name: bias.detach().clone() for name, bias in biases(built).items()}
    assert before
    built.forward(example_microbatch(61))
    built.model.before_update(skipped=True)
    built.model.before_update(skipped=False)
    assert all(torch.equal(bias, before[name]) for name, bias in biases(built).items())


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        ({"experts.router.groups": 3}, "4 experts do not divide into 3 groups; set it to 2 or 4"),
        ({"experts.router.groups": 2, "experts.router.top_groups": 3}, "set it to at most 2"),
        (
            {"experts.router.groups": 4, "experts.router.group_best": 1},
            "1 of 4 groups have 1 experts, and a token needs 2",
        ),
        ({"experts.router.groups": 4, "experts.router.top_groups": 2}, "a group has 1 experts"),
        ({"experts.layer_first": 2}, "none of 2 layers from layer 2 on has experts"),
        ({"experts.layer_first": 1, "experts.layer_freq": 2}, "none of 2 layers from layer 1 on has experts"),
        ({"experts.layer_first": 1, "experts.layer_pattern": (1, 0)}, "none of 2 layers from layer 1 on has experts"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(sets: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        GptOptions.model_validate(nested({**SMALL, **sets}))
