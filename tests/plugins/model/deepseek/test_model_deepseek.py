"""Latent attention against transformers' DeepSeek-V3, the suite of its kind, and what its options refuse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from megatron_run.config.values import nested
from megatron_run.contracts import Decoding, Microbatch
from megatron_run_engine.builtin.model.gpt import AttentionOptions, RopeOptions
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_model_deepseek import _FIXED, DeepSeek, DeepSeekOptions
from megatron_run_testing import Check
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.model import Built, build_model, model_checks

HIDDEN, HEADS, LENGTH = 24, 5, 16
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": HIDDEN,  # 5 heads do not divide it
    "num_heads": HEADS,
    "ffn_size": 40,
    "vocab_size": 61,
    "init_std": 0.3,
    "kv_rank": 12,
    "rope_head_size": 4,
    "nope_head_size": 6,
    "value_head_size": 8,
}
THEIR_SIZES = {"kv_lora_rank": 12, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
#: What our options and transformers' have for one model.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "latent queries": ({"query_rank": 7}, {"q_lora_rank": 7}),
    "queries without a latent": ({}, {}),
    "small values": ({"nope_head_size": 12, "value_head_size": 3}, {"qk_nope_head_dim": 12, "v_head_dim": 3}),
    "a longer text": (
        {
            "rope.scaling": "yarn",
            "rope.factor": 4.0,
            "rope.original_length": 4,
            "rope.high_freq": 2.0,
            "rope.attention_factor": 1.0,
            "attention.scale": (1 + 0.1 * math.log(4)) ** 2 / math.sqrt(10),
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope.theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 4,
                "beta_fast": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            }
        },
    ),
}


def options_of(given: dict[str, Any]) -> DeepSeekOptions:
    return DeepSeekOptions.model_validate(nested({**SMALL, **given}))


def deepseek(given: dict[str, Any]) -> Built:
    options = options_of(given)
    context = single_process_context(options, dtype=torch.float32, train={"sequence_length": LENGTH})
    built = build_model(lambda context, _: DeepSeek(context, options), context, options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # norms of ones would hide where they are applied
        for parameter in (each for each in built.infos if each.ndim == 1):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return built


def theirs(options: dict[str, Any]) -> tuple[Any, Any]:
    """Their attention without the norm before it, and its rotations."""
    module = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    configuration = pytest.importorskip("transformers.models.deepseek_v3.configuration_deepseek_v3")
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, **THEIR_SIZES}
    config = configuration.DeepseekV3Config(max_position_embeddings=LENGTH, **{**sizes, **options})
    config._attn_implementation = "eager"
    return module.DeepseekV3Attention(config, 0), module.DeepseekV3RotaryEmbedding(config)


def pairs(ours: Any, block: Any) -> Iterator[tuple[Any, Any, Tensor]]:
    """Our parameter, theirs, and for each row of theirs the row of ours.

    Their features that rotate come last in pairs, ours first in halves; their keys and values alternate by head.
    """
    shape = ours.shape
    in_pairs = torch.arange(shape.rope).view(2, -1).t().flatten()
    head = torch.cat((torch.arange(shape.rope, shape.head), in_pairs))
    queries = (torch.arange(HEADS)[:, None] * shape.head + head).flatten()
    if shape.query_rank is None:
        yield ours.query.weight, block.q_proj.weight, queries
    else:
        yield ours.query_down.weight, block.q_a_proj.weight, torch.arange(shape.query_rank)
        yield ours.query.norm.weight, block.q_a_layernorm.weight, torch.arange(shape.query_rank)
        yield ours.query.weight, block.q_b_proj.weight, queries
    latent = torch.cat((torch.arange(shape.kv_rank), shape.kv_rank + in_pairs))
    yield ours.latent.weight, block.kv_a_proj_with_mqa.weight, latent
    yield ours.key_value.norm.weight, block.kv_a_layernorm.weight, torch.arange(shape.kv_rank)
    keys = torch.arange(HEADS * shape.nope).view(HEADS, -1)
    values = HEADS * shape.nope + torch.arange(HEADS * shape.value).view(HEADS, -1)
    yield ours.key_value.weight, block.kv_b_proj.weight, torch.cat((keys, values), dim=1).flatten()
    yield ours.output.weight, block.o_proj.weight, torch.arange(HIDDEN)


@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_every_gradient_are_those_of_deepseek_v3(variant: str) -> None:
    given, options = VARIANTS[variant]
    chunk: Any = deepseek(given).chunks[0]
    ours = chunk.layers["0"].attention
    ours.norm = torch.nn.Identity()
    block, rotary = theirs(options)
    matrices = list(pairs(ours, block))
    assert len(matrices) == len(list(block.parameters()))
    with torch.no_grad():
        for mine, other, rows in matrices:
            other.copy_(mine[rows])
    x = torch.randn(LENGTH, 2, HIDDEN, generator=torch.Generator().manual_seed(3))
    weights = torch.linspace(-1, 1, x.numel()).view_as(x)
    one: Any = x.clone().requires_grad_()
    two: Any = x.transpose(0, 1).contiguous().requires_grad_()
    hidden = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)[None, None]
    found = ours(one)
    expected = block(two, rotary(two, torch.arange(LENGTH)[None]), hidden)[0].transpose(0, 1)
    assert expected.std() > 0.1, "values near zero would not tell"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found.backward(weights)
    expected.backward(weights)
    torch.testing.assert_close(one.grad, two.grad.transpose(0, 1), rtol=1e-5, atol=1e-5)
    for mine, other, rows in matrices:
        size = max(1.0, float(other.grad.abs().max()))
        torch.testing.assert_close(main_grad(mine)[rows], other.grad, rtol=1e-5, atol=1e-5 * size)


WHOLE = options_of({"num_layers": 4, "query_rank": 7, "dropout": 0.1, "experts.count": 4, "experts.layer_first": 1})


@pytest.mark.parametrize(
    "check",
    model_checks(DeepSeek, WHOLE),  # type: ignore[arg-type]  # it takes its own options
    ids=lambda check: check.name,
)
def test_conforms(check: Check) -> None:
    check.run()


def test_a_text_read_in_pieces_has_the_logits_of_the_whole() -> None:
    built = deepseek({"query_rank": 7}).train(mode=False)
    tokens = torch.randint(61, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    caches: dict[int, Any] = {}
    with torch.no_grad():
        whole = built.forward(Microbatch(0, 1, 0, {"tokens": tokens}, train=False))[0].logits
        pieces = []
        for first, stop in ((0, 7), (7, 8), (8, LENGTH)):
            read = Microbatch(0, 1, 0, {"tokens": tokens[:, first:stop]}, False, Decoding(first, caches=caches))
            pieces.append(built.forward(read)[0].logits)
    assert whole is not None
    torch.testing.assert_close(torch.cat([piece for piece in pieces if piece is not None]), whole)


def test_floating_point_operations_are_those_of_the_matrices() -> None:
    """Six a parameter of each matrix, and the two products of attention, in which keys are larger than values."""
    flops = options_of({"query_rank": 7}).costs(LENGTH, 61).flops_per_token
    built = deepseek({"query_rank": 7})
    matrices = sum(p.numel() for p, info in built.infos.items() if p.ndim > 1 and "embedding" not in info.name)
    padding = sum(len(p) - 61 for p, info in built.infos.items() if info.name == "output.weight") * HIDDEN
    products = 2 * LENGTH * HEADS * (10 + 8)
    assert flops == pytest.approx(6 * (matrices - padding + products))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"value_head_size": 11}, "value_head_size=11 is above rope_head_size [+] nope_head_size = 10"),
        ({"value_head_size": 11, "num_kv_heads": 1}, "num_kv_heads=1: .*; and value_head_size=11 is above"),
        ({"num_kv_heads": 1}, "num_kv_heads=1: with latent attention it is 5; leave it out"),
        ({"head_size": 12}, "head_size=12: with latent attention it is 10"),
        ({"rope_head_size": 3}, "multiple of 2"),
        ({"attention.qk_norm": "head"}, "qk_norm=head: with latent attention it is none"),
        ({"position": "learned"}, "Input should be 'rope'"),
        ({"kv_rank": None}, "kv_rank"),
    ],
)
def test_what_latent_attention_cannot_be_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        options_of(given)


def test_each_option_of_attention_is_read_or_refused() -> None:
    """Latent attention is a layer of its own: an option that ``gpt`` gets must not be accepted and then ignored."""
    read = {"attention.scale", "attention.qk_clip", *(f"rope.{name}" for name in RopeOptions.model_fields)}
    groups = (("attention", AttentionOptions), ("rope", RopeOptions))
    keys = {f"{name}.{key}" for name, group in groups for key in group.model_fields}
    assert keys <= read | {*_FIXED}, "let LatentAttention read it, and name it here; or add it to _FIXED"
    assert "attention.scale" in keys
