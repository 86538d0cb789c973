"""Segments that are recomputed: equal bits, what stays saved, and what is sent again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_run.config.values import nested
from megatron_run.contracts import Microbatch
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.nn.moe import dispatch
from megatron_run_testing.build_contexts import example_microbatch, logical_gradients, single_process_context
from megatron_run_testing.model import Built, build_model

VOCAB, LAYERS, HIDDEN, HEADS, LENGTH, BATCH = 61, 2, 32, 4, 64, 2
EXPERTS = {"experts.count": 4, "experts.top_k": 2, "experts.ffn_size": 32, "experts.aux_loss_coeff": 0.1}


def built(dtype: torch.dtype = torch.float32, model: dict[str, Any] | None = None, **train: Any) -> Built:
    sizes = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_heads": HEADS, "vocab_size": VOCAB}
    options = GptOptions.model_validate(nested({**sizes, **(model or {})}))
    train = {"sequence_length": LENGTH, "micro_batch_size": BATCH, **train}
    context = single_process_context(options, dtype=dtype, train=train)
    return build_model(lambda context, _: Gpt(context, options), context, options).train(mode=True)


def microbatch() -> Microbatch:
    return example_microbatch(VOCAB, batch=BATCH, length=LENGTH)


def saved_bytes(model: Built) -> int:
    """Bytes that a forward leaves for its backward, each storage once, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.infos}
    found: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = x
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        losses = model.forward(microbatch())[0].losses
        assert losses["lm"][0].requires_grad
    return sum(x.untyped_storage().nbytes() for x in found.values())


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_the_core_of_attention_saves_nothing_that_grows_with_the_square_of_the_length(dropout: float) -> None:
    """Korthikanti et al. 2022, equation 1 and section 5: a layer keeps 5 a s^2 b bytes less, in 16 bits.

    These are the softmax and its dropout's result (2 bytes each), and a mask. The paper's mask has 1 byte a value;
    PyTorch's dropout on a CPU keeps one of the values' type. Without dropout the softmax alone is kept.
    """
    mask = 2
    values = 2 + mask + 2 if dropout else 2
    whole, selective = (
        saved_bytes(built(torch.bfloat16, {"dropout": dropout}, recompute=names)) for names in ("none", ("core_attn",))
    )
    assert whole - selective == LAYERS * values * HEADS * LENGTH**2 * BATCH


def test_full_recomputation_keeps_a_layers_input_alone() -> None:
    """2 s b h bytes a layer in 16 bits (Korthikanti et al. 2022, section 5)."""
    one, two = (
        saved_bytes(built(torch.bfloat16, {"dropout": 0.1, "num_layers": layers}, recompute="full"))
        for layers in (LAYERS, 2 * LAYERS)
    )
    assert two - one == LAYERS * 2 * LENGTH * BATCH * HIDDEN


def test_segments_that_are_neighbours_keep_what_enters_the_first() -> None:
    """Rows that travelled to the experts are kept for the experts alone, and sent again where both are named."""
    model, names = {"dropout": 0.0, **EXPERTS}, ("moe_dispatch", "moe_experts")
    alone, both = (saved_bytes(built(model=model, recompute=each)) for each in (names[1:], names))
    assert alone - both > LAYERS * 4 * 2 * LENGTH * BATCH * HIDDEN * 0.9  # top_k rows a token, in fp32; maps are small


@pytest.mark.parametrize(
    ("names", "sent"),
    [
        ("none", 2),
        (("moe_experts",), 2),
        (("moe_dispatch", "moe_experts"), 3),
        (("attn", "moe_router", "moe_preprocess"), 2),
        ("full", 4),
    ],
)
def test_messages_are_sent_again_only_where_their_content_is_gone(
    names: Any, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There and back in a forward. The results travel again only where combine reads them anew.

    With a capacity, here above all tokens, rows pass through the exchange on one rank too.
    """
    exchange, calls = dispatch._exchange, []

    def counted(*arguments: Any) -> Tensor:
        calls.append(1)
        return exchange(*arguments)

    monkeypatch.setattr(dispatch, "_exchange", counted)
    model = {"dropout": 0.1, "experts.capacity_factor": 4.0, **EXPERTS}
    built(model=model, recompute=names).step(microbatch())
    assert len(calls) == sent * LAYERS


@pytest.mark.parametrize(
    "train",
    [
        {"recompute": ("moe_experts",)},
        {"recompute": ("attn", "moe_dispatch", "moe_experts", "moe_combine")},
        {"recompute": ("core_attn", "moe_router", "moe_preprocess"), "offload": ("moe_experts", "attn")},
        {"recompute": "full", "offload": "full"},
        {"recompute": ("attn", "moe_combine"), "offload": ("attn", "moe_router", "head")},
        {"offload": ("embedding", "attn", "moe_dispatch", "loss")},
    ],
)
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_experts_have_the_bits_of_a_run_without(train: dict[str, Any], dispatcher: str) -> None:
    model = {"dropout": 0.1, "position": "rope", "experts.shared.ffn_size": 16, **EXPERTS}
    model["experts.dispatcher"] = dispatcher
    plain, other = built(model=model), built(model=model, **train)
    for step in (1, 2):
        example = example_microbatch(VOCAB, batch=BATCH, length=LENGTH, step=step)
        assert plain.step(example)[0].equal(other.step(example)[0])
    expected, found = logical_gradients(plain.infos), logical_gradients(other.infos)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
