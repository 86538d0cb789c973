"""The order ``pre`` against megatron-core's BertModel, which has the same one, with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.support.megatron import installed
from megatron_run.contracts import Microbatch
from megatron_run_testing.build_contexts import logical_values
from megatron_run_testing.model import Built
from tests.plugins.model.bert.test_model_bert import DOCUMENTS, LENGTH, REAL, bert, pairs
from tests.support.megatron_checkpoints import megatron_core

pytestmark = [
    pytest.mark.skipif(not installed(), reason="megatron-core is the oracle"),
    pytest.mark.filterwarnings("ignore"),  # it warns of its own defaults
]
HEADS, HIDDEN, VOCAB = 4, 24, 61
#: Their modules and ours; the layer's number stands for the braces.
NAMES = {
    "embedding.word_embeddings": "embedding.word",
    "embedding.position_embeddings": "embedding.position",
    "embedding.tokentype_embeddings": "embedding.token_type",
    "encoder.layers.{}.input_layernorm": "layers.{}.attention.qkv.norm",
    "encoder.layers.{}.self_attention.linear_proj": "layers.{}.attention.output",
    "encoder.layers.{}.pre_mlp_layernorm": "layers.{}.mlp.input.norm",
    "encoder.layers.{}.mlp.linear_fc1": "layers.{}.mlp.input.up",
    "encoder.layers.{}.mlp.linear_fc2": "layers.{}.mlp.output",
    "encoder.final_layernorm": "head.final_norm",
    "lm_head.dense": "head.dense",
    "lm_head.layer_norm": "head.norm",
    "pooler.dense": "head.pooler.dense",
    "binary_head": "head.order",
}


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Any]:
    with megatron_core(tmp_path / "store"):
        bert_model, specs = (
            import_module(f"megatron.core.models.bert.{name}") for name in ("bert_model", "bert_layer_specs")
        )
        config = import_module("megatron.core.transformer.transformer_config").TransformerConfig(
            num_layers=4,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            ffn_hidden_size=40,
            layernorm_epsilon=1e-12,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            params_dtype=torch.float64,
        )
        made = bert_model.BertModel(
            config,
            num_tokentypes=2,
            transformer_layer_spec=specs.bert_layer_local_spec,
            vocab_size=VOCAB,
            max_sequence_length=LENGTH,
            parallel_output=False,
            share_embeddings_and_output_weights=True,
        )
        yield made.double().eval()


def their_state(built: Built, layers: int) -> dict[str, Tensor]:
    """Our weights by their names; they keep query, key and value of a head together."""
    ours, state = logical_values(built.infos), {}
    for theirs, name in NAMES.items():
        for layer in range(layers) if "{}" in theirs else (0,):
            for part in ("weight", "bias"):
                if (full := f"{name.format(layer)}.{part}") in ours:
                    state[f"{theirs.format(layer)}.{part}"] = ours[full]
    for layer in range(layers):
        for part in ("weight", "bias"):
            fused = [ours[f"layers.{layer}.attention.qkv.{each}.{part}"] for each in ("query", "key", "value")]
            rows = [each.unflatten(0, (HEADS, -1)) for each in fused]
            state[f"encoder.layers.{layer}.self_attention.linear_qkv.{part}"] = torch.cat(rows, 1).flatten(0, 1)
    state["output_layer.bias"] = ours["head.bias.weight"]
    return state


def test_logits_of_words_and_of_the_order_are_megatron_core_s(network: Any) -> None:
    _, built = bert({"head": "pretraining", "norm.order": "pre"})
    found = network.load_state_dict(their_state(built, 4), strict=False)
    assert not found.unexpected_keys
    assert all("_extra_state" in name for name in found.missing_keys), found.missing_keys
    fields = pairs().fields
    words, order = network(fields["tokens"], REAL.long(), tokentype_ids=fields["token_types"], lm_labels=None)
    given = {"tokens": fields["tokens"], "token_types": fields["token_types"], "documents": DOCUMENTS}
    logits = built.train(mode=False).forward(Microbatch(0, 1, 0, given, train=False))[0].logits
    assert logits is not None
    ours = logits[..., :VOCAB].transpose(0, 1)
    torch.testing.assert_close(ours[REAL], words[REAL], rtol=1e-5, atol=1e-5)
    loss = built.forward(pairs())[0].losses["model/order_loss"][0]
    expected = torch.nn.functional.cross_entropy(order, fields["swapped"])
    torch.testing.assert_close(loss, expected.double(), rtol=1e-5, atol=1e-5)
