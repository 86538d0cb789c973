"""The shapes that follow from options are those of the network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megatron_run.errors import InputError
from megatron_run.interchange.gpt import gpt_options, logical_shapes, shapes_fault
from megatron_run.interchange.weights import Weights
from megatron_run.testing.context import logical_values
from tests.support.interchanged import GPT2, LENGTH, LLAMA, network, options_of

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "no bias, feed-forward unset": {**GPT2, "bias": False, "ffn_size": None},
    "swiglu with biases, one kv head": {**GPT2, "activation": "swiglu", "num_kv_heads": 1, "tie_embeddings": False},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_shapes_are_those_of_the_network(variant: Mapping[str, Any]) -> None:
    options = options_of(variant)
    built = {name: tuple(tensor.shape) for name, tensor in logical_values(network(options).infos).items()}
    assert logical_shapes(options, LENGTH) == built


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


def test_learned_positions_need_a_length() -> None:
    with pytest.raises(InputError, match="longest sequence is unknown"):
        logical_shapes(options_of(GPT2), None)
