"""A layer of experts beside Hugging Face's Mixtral block, on the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_run.contracts.actions import Place
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_testing.build_contexts import prepare, single_process_context

HIDDEN, FFN, EXPERTS, LENGTH, BATCH = 24, 40, 8, 16, 2


def ours() -> Any:
    """The feed-forward half of a block, without a norm."""
    options = GptOptions(
        num_layers=1,
        hidden_size=HIDDEN,
        num_heads=2,
        vocab_size=61,
        experts=EXPERTS,
        top_k=2,
        expert_ffn_size=FFN,
        activation="swiglu",
        bias=False,
        dropout=0.0,
        aux_loss_coeff=0.0,
        init_std=0.3,
    )
    context = single_process_context(options, dtype=torch.float32)
    chunk: Any = Gpt(context, options).build_chunk(0, (Place(0, 0, range(1)),), DenseLayers(context), {})
    prepare(context, [chunk])
    moe = chunk.layers["0"].moe
    moe.norm = nn.Identity()
    return moe


def run(moe: Any, x: Tensor) -> Tensor:
    """What the segments of a block do: [s, b, h] -> [s, b, h]."""
    tokens, weights, chosen, load = moe.route(x)
    order, place, counts, _ = moe.place(weights, chosen, load)
    rows, routed = moe.dispatcher.dispatch(tokens, weights, order, place, counts)
    y: Tensor = moe.combine(x.shape[1], moe.compute(rows, weights, routed), weights, order, place)
    return y


def theirs(moe: Any) -> Any:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    configuration = pytest.importorskip("transformers.models.mixtral.configuration_mixtral")
    config = configuration.MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=EXPERTS, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    block = mixtral.MixtralSparseMoeBlock(config)
    with torch.no_grad():
        block.gate.weight.copy_(moe.router.weight)
        block.experts.gate_up_proj.copy_(moe.experts.input.weight.view(EXPERTS, 2 * FFN, HIDDEN))
        block.experts.down_proj.copy_(moe.experts.output.weight.view(EXPERTS, HIDDEN, FFN))
    return block


def test_output_and_every_gradient_are_mixtrals() -> None:
    moe = ours()
    block = theirs(moe)
    x = torch.randn(LENGTH, BATCH, HIDDEN, generator=torch.Generator().manual_seed(3))
    weights = torch.linspace(-1, 1, x.numel()).view_as(x)
    mine: Any = x.clone().requires_grad_()
    other: Any = x.transpose(0, 1).contiguous().requires_grad_()
    found, expected = run(moe, mine), block(other).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    found.backward(weights)
    expected.backward(weights)
    pairs = {
        "x": (mine.grad, other.grad.transpose(0, 1)),
        "router": (main_grad(moe.router.weight), block.gate.weight.grad),
        "input": (main_grad(moe.experts.input.weight), block.experts.gate_up_proj.grad.flatten(0, 1)),
        "output": (main_grad(moe.experts.output.weight), block.experts.down_proj.grad.flatten(0, 1)),
    }
    for name, (gradient, wanted) in pairs.items():
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5, msg=f"the gradient of {name} differs")
