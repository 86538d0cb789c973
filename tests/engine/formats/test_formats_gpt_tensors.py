"""The shapes that follow from options are those of the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megatron_run.contracts import Weights
from megatron_run.errors import InputError, RunError
from megatron_run_engine.formats.gpt_tensors import gpt_options, logical_shapes, shapes_fault
from megatron_run_testing.build_contexts import logical_values
from tests.support.small_models import GPT2, LENGTH, LLAMA, network, options_of

#: Of one layer, as its papers draw it.
DENSE = {
    "embedding.word.weight": (61, 24),
    "layers.0.attention.qkv.norm.weight": (24,),
    "layers.0.attention.qkv.query.weight": (24, 24),
    "layers.0.attention.output.weight": (24, 24),
    "layers.0.mlp.input.norm.weight": (24,),
    "layers.0.mlp.input.up.weight": (40, 24),
    "layers.0.mlp.output.weight": (24, 40),
    "final_norm.weight": (24,),
}
OF_GPT2 = {
    **DENSE,
    "embedding.position.weight": (LENGTH, 24),
    "layers.0.attention.qkv.key.weight": (24, 24),
    "layers.0.attention.qkv.value.weight": (24, 24),
    "layers.0.attention.qkv.norm.bias": (24,),
    "layers.0.attention.qkv.query.bias": (24,),
    "layers.0.attention.qkv.key.bias": (24,),
    "layers.0.attention.qkv.value.bias": (24,),
    "layers.0.attention.output.bias": (24,),
    "layers.0.mlp.input.norm.bias": (24,),
    "layers.0.mlp.input.up.bias": (40,),
    "layers.0.mlp.output.bias": (24,),
    "final_norm.bias": (24,),
}
OF_LLAMA = {
    **DENSE,
    "layers.0.attention.qkv.key.weight": (8, 24),
    "layers.0.attention.qkv.value.weight": (8, 24),
    "layers.0.mlp.input.gate.weight": (40, 24),
    "output.weight": (61, 24),
}


@pytest.mark.parametrize(("given", "shapes"), [(GPT2, OF_GPT2), (LLAMA, OF_LLAMA)], ids=["gpt2", "llama"])
def test_shapes_follow_from_the_options(given: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    assert logical_shapes(options_of({**given, "num_layers": 1}), LENGTH) == shapes


def test_experts_are_tensors_of_the_model_too() -> None:
    options = options_of({**LLAMA, "experts.count": 4})
    built = {name: tuple(tensor.shape) for name, tensor in logical_values(network(options).infos).items()}
    assert logical_shapes(options, LENGTH) == built
    assert built != OF_LLAMA


def test_what_differs_is_named() -> None:
    shapes = {"a": (2, 3), "b": (4,), "c": (5,)}
    assert shapes_fault(shapes, shapes) == ""
    fault = shapes_fault({"a": (3, 2), "b": (4,), "d": (1,)}, shapes)
    assert fault == "it lacks c; it also has d; a is [3, 2] there and [2, 3] here"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({**GPT2, "use": "mine"}, "the model is mine"),
        ({**GPT2, "num_heads": 5}, "num_heads"),
        ({**GPT2, "vocab_size": None}, "vocabulary is unknown"),
        ({**GPT2, "colour": "red"}, "colour"),
    ],
)
def test_what_is_no_gpt_is_refused(config: Mapping[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        gpt_options(Weights(config, {}))


def test_a_model_made_from_gpt_has_tensors_of_its_own() -> None:
    latents = {"kv_rank": 12, "rope_head_size": 4, "nope_head_size": 6, "value_head_size": 8}
    given = {**latents, "num_layers": 1, "hidden_size": 24, "num_heads": 3, "ffn_size": 40, "vocab_size": 61}
    options = gpt_options(Weights({"use": "deepseek", **given}, {}), "deepseek")
    built = {name: tuple(tensor.shape) for name, tensor in logical_values(network(options).infos).items()}
    assert logical_shapes(options, LENGTH, model="deepseek") == built
    assert built["layers.0.attention.key_value.key.weight"] == (18, 12)


@pytest.mark.parametrize(("model", "why"), [("bert", "the model is bert"), ("absent", "model=absent")])
def test_another_model_has_no_such_options(model: str, why: str) -> None:
    with pytest.raises(RunError, match=why):
        gpt_options(Weights({"use": model}, {}), model)


def test_learned_positions_need_a_length() -> None:
    with pytest.raises(InputError, match="longest sequence is unknown"):
        logical_shapes(options_of(GPT2), None)
