"""The arithmetic of a network's sizes."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, bmm_flop, mm_flop

from megatron_run.config.values import nested
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_testing.build_contexts import example_microbatch, single_process_context
from megatron_run_testing.model import build_model

#: Two of three layers; the weighted sums over experts are products too, but not of weights.
EXPERTS = {
    "experts.count": 5,
    "experts.top_k": 3,
    "experts.ffn_size": 24,
    "experts.layer_freq": 2,
    "experts.shared.ffn_size": 40,
    "experts.shared.gate": True,
}


@pytest.mark.parametrize(
    "extra",
    [{}, {"activation": "swiglu", "num_kv_heads": 2, "ffn_size": 40}, {"tie_embeddings": False}, EXPERTS],
    ids=["gpt2", "grouped swiglu", "untied", "experts"],
)
def test_flops_are_those_that_torch_counts(extra: dict[str, object]) -> None:
    """A vocabulary of 128 needs no padding, and unfused attention has no recomputation: the formula is exact."""
    options = GptOptions.model_validate(
        nested({"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 128, "dropout": 0.0, **extra})
    )
    context = single_process_context(options, dtype=torch.float32)
    built = build_model(Gpt, context, options)  # type: ignore[arg-type]  # a Gpt takes GptOptions
    built.forward(example_microbatch(128))  # whether there are grouped products is found by trying one
    choices = [options.experts.count, 32 * options.experts.top_k]
    # Weight gradients are accumulated in place; torch counts neither that nor our own operations by itself.
    accumulated = {
        # A product with [experts, choices] zeros and ones is the sum of a bias's gradients, which is not counted.
        torch.ops.aten.addmm_: lambda _, left, right, **__: (list(left) != choices) * mm_flop(left, right),
        # Products of groups whose counts the host does not know; what these call is not seen.
        torch.ops.megatron_run_engine.grouped_product: lambda rows, matrices, *_, **__: (
            2 * math.prod(rows) * matrices[-1]
        ),
        torch.ops.megatron_run_engine.add_grouped_products: lambda _, left, right, *__, **___: (
            2 * math.prod(left) * right[-1]
        ),
        torch.ops.aten.bmm: lambda left, right, **_: 0 if 1 in (left[1], right[2]) else bmm_flop(left, right),
    }
    with FlopCounterMode(display=False, custom_mapping=accumulated) as counter, sdpa_kernel(SDPBackend.MATH):
        built.step(example_microbatch(128))
    assert counter.get_total_flops() == 2 * 16 * options.costs(16, 128).flops_per_token
