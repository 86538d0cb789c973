"""The layers of one rank: shapes, logical tensors, dropout of attention, masks."""

import math

import pytest
import torch
from torch import Tensor

from megatron_run.contracts import AttentionShape, Init, LinearPart, LinearSpec, ParameterSpec
from megatron_run.registry.loaded_plugin import NoOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_testing.build_contexts import single_process_context

INIT = Init("normal", 0.02)
QKV = (LinearPart("query", 8), LinearPart("key", 4), LinearPart("value", 4))


@pytest.fixture
def layers() -> DenseLayers:
    return DenseLayers(single_process_context(NoOptions()))


def specs(module: torch.nn.Module) -> dict[str, ParameterSpec]:
    found = module.parameter_specs
    assert isinstance(found, dict)
    return found


def test_parts_of_a_fused_layer_cover_its_rows_in_order(layers: DenseLayers) -> None:
    linear = layers.column_linear(LinearSpec(6, QKV, INIT, bias=True))
    weight, bias = specs(linear)["weight"], specs(linear)["bias"]
    assert [(part.name, part.shape, part.local) for part in weight.parts] == [
        ("query.weight", (8, 6), range(8)),
        ("key.weight", (4, 6), range(8, 12)),
        ("value.weight", (4, 6), range(12, 16)),
    ]
    assert [(part.name, part.shape) for part in bias.parts] == [
        ("query.bias", (8,)),
        ("key.bias", (4,)),
        ("value.bias", (4,)),
    ]
    assert (weight.init, bias.init.kind) == (INIT, "zeros")


@pytest.mark.parametrize(("vocab", "rows"), [(1, 128), (128, 128), (257, 384), (50257, 50304)])
def test_the_vocabulary_is_padded_and_padding_belongs_to_no_logical_tensor(
    layers: DenseLayers, vocab: int, rows: int
) -> None:
    embedding = layers.vocab_embedding(vocab, 2, init=INIT)
    assert [tuple(parameter.shape) for parameter in embedding.parameters()] == [(rows, 2)]
    (part,) = specs(embedding)["weight"].parts
    assert (part.shape, part.local) == ((vocab, 2), range(vocab))


def test_a_linear_layer_without_bias_has_none(layers: DenseLayers) -> None:
    assert [name for name, _ in layers.row_linear(LinearSpec(4, 6, INIT, bias=False)).named_parameters()] == ["weight"]


def test_parameters_are_made_on_the_meta_device_when_planning(layers: DenseLayers) -> None:
    with torch.device("meta"):
        modules = [layers.row_linear(LinearSpec(4, 6, INIT, bias=True)), layers.norm("layernorm", 4)]
    assert {parameter.device.type for module in modules for parameter in module.parameters()} == {"meta"}


def plain_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """[s, b, n, d] and [s, b, k, d] -> [s, b, n * d]."""
    share = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(share, 2), value.repeat_interleave(share, 2)
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) / math.sqrt(query.shape[-1])
    probabilities = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1)
    return torch.einsum("bnst,tbnd->sbnd", probabilities, value).flatten(2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_its_definition(layers: DenseLayers, kv_heads: int) -> None:
    query, key, value = (torch.randn(7, 2, heads, 8).double() for heads in (4, kv_heads, kv_heads))
    attention = layers.core_attention(AttentionShape(4, kv_heads, 8, 0), 0.0)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    torch.testing.assert_close(attention(query, key, value, None), plain_attention(query, key, value, causal))
    window = causal & ~causal.tril(-3)  # each position sees itself and two before
    torch.testing.assert_close(attention(query, key, value, window), plain_attention(query, key, value, window))


def test_attention_drops_probabilities_while_training_only(layers: DenseLayers) -> None:
    query, key = torch.randn(6, 1, 2, 8).double(), torch.randn(6, 1, 2, 8).double()
    value = torch.eye(6, 8).double()[:, None, None].expand(6, 1, 2, 8)  # the output spells the probabilities
    attention = layers.core_attention(AttentionShape(2, 2, 8, 0), 0.25)
    still = attention.eval()(query, key, value, None)
    draws = torch.stack([attention.train()(query, key, value, None) for _ in range(400)])
    kept = draws[:, still > 0]
    assert 0.2 < (kept == 0).double().mean() < 0.3
    scaled = (kept / (still[still > 0] / 0.75))[kept != 0]
    torch.testing.assert_close(scaled, torch.ones_like(scaled))


def test_dropout_follows_the_default_stream(layers: DenseLayers) -> None:
    dropout, x = layers.dropout(0.5).train(), torch.ones(100)
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(dropout(x))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
