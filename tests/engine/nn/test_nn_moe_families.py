"""A layer of experts beside the blocks of Hugging Face's families, on the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_run.config.values import nested
from megatron_run.contracts.schedule import Place
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_testing.build_contexts import prepare, single_process_context

HIDDEN, FFN, EXPERTS, LENGTH, BATCH = 24, 40, 8, 16, 2
#: Family -> (our options, the class of its configuration without "Config", the options of that).
FAMILIES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "mixtral": ({}, "Mixtral", {"num_local_experts": EXPERTS, "intermediate_size": FFN}),
    "qwen3_moe": ({}, "Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": FFN, "norm_topk_prob": True}),
    "qwen2_moe": (
        {"experts.router.pre_softmax": True, "experts.shared.ffn_size": 20, "experts.shared.gate": True},
        "Qwen2Moe",
        {"num_experts": EXPERTS, "moe_intermediate_size": FFN, "shared_expert_intermediate_size": 20},
    ),
    "deepseek_v3": (
        {
            "experts.top_k": 3,
            "experts.router.score_function": "sigmoid",
            "experts.router.groups": 4,
            "experts.router.top_groups": 2,
            "experts.router.scaling_factor": 2.5,
            "experts.router.bias_rate": 1e-3,
            "experts.shared.ffn_size": 2 * FFN,
        },
        "DeepseekV3",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": FFN,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
        },
    ),
}


def ours(more: dict[str, Any]) -> Any:
    """The feed-forward half of a block, without a norm."""
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_heads": 2, "vocab_size": 61, "experts.ffn_size": FFN}
    network = {"activation": "swiglu", "bias": False, "dropout": 0.0, "init_std": 0.3}
    options = GptOptions.model_validate(
        nested(
            {**sizes, **network, "experts.count": EXPERTS, "experts.top_k": 2, "experts.aux_loss_coeff": 0.0, **more}
        )
    )
    context = single_process_context(options, dtype=torch.float32)
    chunk: Any = Gpt(context, options).build_chunk(0, (Place(0, 0, range(1)),), DenseLayers(context), {})
    prepare(context, [chunk])
    moe = chunk.layers["0"].moe
    moe.norm = nn.Identity()
    if moe.router.expert_bias is not None:  # at first it is zero
        moe.router.expert_bias.data.copy_(torch.linspace(-0.3, 0.3, EXPERTS))
    return moe


def run(moe: Any, x: Tensor) -> Tensor:
    """What the segments of a block do: [s, b, h] -> [s, b, h]."""
    tokens, weights, chosen, load, *y = moe.route(x)
    order, place, counts, *_ = moe.place(weights, chosen, load)
    rows, routed = moe.dispatcher.dispatch(tokens, weights, order, place, counts)
    out: Tensor = moe.combine(x.shape[1], moe.compute(rows, weights, routed), weights, order, place, *y)
    return out


def theirs(family: str, name: str, options: dict[str, Any]) -> Any:
    module = f"transformers.models.{family}"
    config = getattr(pytest.importorskip(f"{module}.configuration_{family}"), f"{name}Config")(
        **{"hidden_size": HIDDEN, "num_experts_per_tok": 2, **options}
    )
    config._experts_implementation = "eager"
    modeling = pytest.importorskip(f"{module}.modeling_{family}")
    return getattr(modeling, f"{name}MoE" if family == "deepseek_v3" else f"{name}SparseMoeBlock")(config)


def matrices(moe: Any, block: Any) -> dict[str, tuple[Any, list[Any]]]:
    """By name, our parameter and theirs, which it holds one after the other."""
    found = {
        "router": (moe.router.weight, [block.gate.weight]),
        "input": (moe.experts.input.weight, [block.experts.gate_up_proj]),
        "output": (moe.experts.output.weight, [block.experts.down_proj]),
    }
    if moe.shared is not None:
        network = block.shared_expert if hasattr(block, "shared_expert") else block.shared_experts
        mlp = moe.shared.mlp
        found["shared input"] = (mlp.input.weight, [network.gate_proj.weight, network.up_proj.weight])
        found["shared output"] = (mlp.output.weight, [network.down_proj.weight])
        if moe.shared.gate is not None:
            found["shared gate"] = (moe.shared.gate.weight, [block.shared_expert_gate.weight])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_every_gradient_are_those_of_the_family(family: str) -> None:
    more, name, options = FAMILIES[family]
    moe, block = ours(more), theirs(family, name, options)
    pairs = matrices(moe, block)
    assert sum(len(parts) for _, parts in pairs.values()) == len(list(block.parameters()))
    with torch.no_grad():
        for parameter, parts in pairs.values():
            for part, rows in zip(parts, parameter.chunk(len(parts)), strict=True):
                part.copy_(rows.view_as(part))
        if moe.router.expert_bias is not None:
            block.gate.e_score_correction_bias.copy_(moe.router.expert_bias)
    x = torch.randn(LENGTH, BATCH, HIDDEN, generator=torch.Generator().manual_seed(3))
    weights = torch.linspace(-1, 1, x.numel()).view_as(x)
    mine: Any = x.clone().requires_grad_()
    other: Any = x.transpose(0, 1).contiguous().requires_grad_()
    found, expected = run(moe, mine), block(other).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found.backward(weights)
    expected.backward(weights)
    torch.testing.assert_close(mine.grad, other.grad.transpose(0, 1), rtol=1e-4, atol=1e-5)
    for matrix, (parameter, parts) in pairs.items():
        wanted = torch.cat([part.grad.reshape(-1, parameter.shape[1]) for part in parts])
        torch.testing.assert_close(
            main_grad(parameter), wanted, rtol=1e-4, atol=1e-5, msg=f"the gradient of {matrix} differs"
        )
