"""The model against a plain float64 reference, its ties, its initial values and its options."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from megatron_run.config.values import nested
from megatron_run.contracts import Microbatch, ParamInfo, StackedLayers
from megatron_run.contracts.schedule import LayoutSpec, Place, looped_layout
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.parameter_init import count_parameters, describe_parameters
from megatron_run_testing.build_contexts import example_microbatch, logical_values, prepare, single_process_context
from megatron_run_testing.model import Built, build_model
from tests.support import plain_gpt
from tests.support.decoders import DECODERS

GPT2 = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "vocab_size": 61}
LLAMA = {
    "num_kv_heads": 2,
    "position": "rope",
    "rope.theta": 500.0,
    "norm.kind": "rmsnorm",
    "activation": "swiglu",
    "ffn_size": 40,
    "bias": False,
    "tie_embeddings": False,
}
LONGROPE = {
    "position": "rope",
    "rope.theta": 100.0,
    "rope.scaling": "longrope",
    "rope.factor": 4.0,
    "rope.short_factors": (1.0, 1.5, 2.0),
    "rope.long_factors": (1.0, 3.0, 5.0),
}
VARIANTS = {
    "gpt2": {},
    "llama": LLAMA,
    "tanh": {"activation": "gelu_tanh"},
    "one kv head, tied rope": {"num_kv_heads": 1, "position": "rope"},
    **{f"longrope, of {length} tokens": {**LONGROPE, "rope.original_length": length} for length in (8, 16)},
    **{name: {**options, "num_layers": 3} for name, options in DECODERS.items()},
}
#: The reference has no dropout; a standard deviation of 0.3 makes every path matter.
EXACT = {"dropout": 0.0, "init_std": 0.3}


def gpt(options: dict[str, Any], stages: int = 1, chunks: int = 1) -> tuple[GptOptions, Built]:
    made = GptOptions.model_validate(nested({**GPT2, **options}))
    return made, build_model(lambda context, _: Gpt(context, made), single_process_context(made), made, stages, chunks)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_loss_and_every_gradient_are_those_of_the_reference(variant: dict[str, Any]) -> None:
    options, built = gpt({**EXACT, **variant})
    weights = plain_gpt.leaves(logical_values(built.infos))
    microbatch = example_microbatch(61)
    tokens, labels, mask = (microbatch.fields[name] for name in ("tokens", "labels", "loss_mask"))
    expected = plain_gpt.loss(weights, tokens, labels, mask, options)
    torch.autograd.backward(expected)
    loss, gradients = built.step(microbatch)
    torch.testing.assert_close(loss, expected.detach())
    assert gradients.keys() == weights.keys()
    for name, weight in weights.items():
        assert weight.grad is not None
        assert weight.grad.any(), f"{name} has no gradient: the test would not see an error in it"
        torch.testing.assert_close(gradients[name], weight.grad, msg=f"the gradient of {name} differs")


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_are_those_of_the_reference(variant: dict[str, Any]) -> None:
    options, built = gpt({**EXACT, **variant})
    tokens = example_microbatch(61).fields["tokens"]
    logits = logits_of(built, tokens)
    torch.testing.assert_close(logits, plain_gpt.logits(logical_values(built.infos), tokens, options).transpose(0, 1))


def logits_of(built: Built, tokens: Tensor) -> Tensor:
    """[s, b, v]: without the padding."""
    found = built.forward(Microbatch(0, 1, 0, {"tokens": tokens}, train=False))[0].logits
    assert found is not None
    return found[..., :61]


class Doubling(nn.Module):
    """Stands for dropout where its place is to be seen."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class DoublingDropout(StackedLayers):
    def dropout(self, p: float) -> nn.Module:
        return Doubling()


def test_dropout_acts_on_the_embedding_and_on_both_residual_additions() -> None:
    options = GptOptions.model_validate(nested({**GPT2, **EXACT}))
    context = single_process_context(options)
    layout = (Place(0, 0, range(2)),)
    chunk = Gpt(context, options).build_chunk(0, layout, DoublingDropout(DenseLayers(context)), {})
    infos = prepare(context, [chunk])
    tokens = example_microbatch(61).fields["tokens"]
    found = chunk(None, Microbatch(0, 1, 0, {"tokens": tokens})).logits
    assert found is not None
    expected = plain_gpt.logits(logical_values(infos), tokens, options, dropout=lambda x: 2 * x)
    torch.testing.assert_close(found[..., :61], expected.transpose(0, 1))


def test_attention_gets_the_dropout_of_the_options() -> None:
    _, built = gpt({"dropout": 0.37})
    cores = [module for name, module in built.chunks[0].named_modules() if name.endswith("attention.core")]
    assert [core.dropout for core in cores] == [0.37, 0.37]


@pytest.mark.parametrize("variant", [{}, LLAMA], ids=["gpt2", "llama"])
def test_initial_values_have_the_deviation_of_their_place(variant: dict[str, Any]) -> None:
    options, built = gpt({**variant, "hidden_size": 64, "vocab_size": 400, "ffn_size": 256})
    residual = 0.02 / math.sqrt(2 * options.num_layers)
    for name, value in logical_values(built.infos).items():
        if "norm.weight" in name:
            assert (value == 1).all(), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            wanted = residual if name.endswith(("attention.output.weight", "mlp.output.weight")) else 0.02
            assert value.std().item() == pytest.approx(wanted, rel=4 / math.sqrt(value.numel())), name
            assert abs(value.mean().item()) < 5 * wanted / math.sqrt(value.numel()), name


def test_no_two_matrices_start_alike() -> None:
    values = [value.flatten()[:4] for value in logical_values(gpt({})[1].infos).values() if value.ndim > 1]
    ordered = sorted(tuple(value.tolist()) for value in values)
    assert all(first != second for first, second in pairwise(ordered))


def test_padding_rows_start_at_zero_and_get_no_gradient() -> None:
    _, built = gpt({})
    built.step(example_microbatch(61))
    word = next(parameter for parameter, info in built.infos.items() if info.name == "embedding.word.weight")
    assert len(word) == 128
    assert not word[61:].any()
    assert not word.main_grad[61:].any()  # type: ignore[attr-defined]  # the engine's attribute


def gpt2_parameters(vocab: int, length: int, hidden: int, layers: int) -> int:
    """12 h^2 + 13 h a layer (matrices, biases, norms), the embeddings, and the final norm."""
    return layers * (12 * hidden**2 + 13 * hidden) + (vocab + length) * hidden + 2 * hidden


def test_gpt2_small_has_its_124_million_parameters() -> None:
    options = GptOptions(num_layers=12, hidden_size=768, num_heads=12, vocab_size=50257)
    context = single_process_context(options, train={"sequence_length": 1024})
    layout = looped_layout(LayoutSpec(4, 1, 12))
    with torch.device("meta"):
        model, layers = Gpt(context, options), DenseLayers(context)
        chunks = [model.build_chunk(position, layout, layers, {}) for position in range(4)]
    infos = [info for chunk in chunks for info in describe_parameters(chunk).values()]
    assert count_parameters(infos) == 124439808 == gpt2_parameters(50257, 1024, 768, 12)


def words(built: Built) -> list[ParamInfo]:
    return [info for info in built.infos.values() if info.name == "embedding.word.weight"]


def test_a_tied_embedding_alone_on_its_chunk_is_an_ordinary_parameter() -> None:
    (word,) = words(gpt({})[1])
    assert (word.tie, word.partial_over, word.counted) == ("", None, True)


def test_chunks_of_one_stage_share_the_tied_embedding() -> None:
    _, built = gpt({}, stages=1, chunks=2)
    (word,) = words(built)
    assert (word.tie, word.partial_over, word.counted) == ("embedding", None, True)
    assert built.chunks[0].embedding.word.weight is built.chunks[1].output.weight  # type: ignore[attr-defined]


def test_copies_on_two_stages_are_partial_and_the_first_counts() -> None:
    assert [(word.tie, word.partial_over, word.counted) for word in words(gpt({}, stages=2)[1])] == [
        ("embedding", "tie", True),
        ("embedding", "tie", False),
    ]


def test_the_last_position_may_be_built_before_the_first() -> None:
    """On a V-shaped layout both ends live on stage 0; whichever is built first gives its weight to the other."""
    options = GptOptions.model_validate(nested(GPT2))
    context = single_process_context(options)
    layout = (Place(0, 0, range(1)), Place(1, 0, range(1, 2)), Place(1, 1, range(0)), Place(0, 1, range(0)))
    model, layers, shared = Gpt(context, options), DenseLayers(context), dict[str, nn.Parameter]()
    last = model.build_chunk(3, layout, layers, shared)
    first = model.build_chunk(0, layout, layers, shared)
    assert first.embedding.word.weight is last.output.weight  # type: ignore[attr-defined]
    (word,) = (info for info in prepare(context, [last, first]).values() if info.tie)
    assert (word.partial_over, word.counted) == (None, True)


def test_an_untied_output_layer_has_a_weight_of_its_own() -> None:
    _, built = gpt({"tie_embeddings": False}, stages=2)
    names = [info.name for info in built.infos.values() if not info.tie and info.counted]
    assert {"embedding.word.weight", "output.weight"} <= set(names)
    assert len(words(built)) == 1


def test_fields_go_where_they_are_used() -> None:
    options = GptOptions.model_validate(nested(GPT2))
    model, layout = Gpt(single_process_context(options), options), looped_layout(LayoutSpec(3, 1, 3))
    assert [model.fields(position, layout) for position in range(3)] == [("tokens",), (), ("labels", "loss_mask")]
    assert model.fields(0, layout[:1]) == ("tokens", "labels", "loss_mask")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"hidden_size": 100, "num_heads": 8},
            "hidden_size 100 does not divide over 8 heads: 100 / 8 = 12.5; set num_heads to 5 or 10, or hidden_size to",
        ),
        (
            {"num_kv_heads": 3},
            "4 heads do not share 3 key-value heads evenly: 4 / 3 = 1.33333; set num_kv_heads to 2 or 4",
        ),
        ({"num_kv_heads": 8}, "4 heads do not share 8 key-value heads evenly: 4 / 8 = 0.5; set num_kv_heads to 4"),
        (
            {"hidden_size": 20, "position": "rope"},
            "rope rotates pairs of features and the head size is odd: 20 / 4 = 5; set hidden_size to 16 or 24",
        ),
        ({"dropout": 1.0}, "less than 1"),
        ({"num_layer": 2}, "Extra inputs are not permitted"),
    ],
)
def test_impossible_options_say_the_arithmetic_and_the_nearest_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        GptOptions.model_validate(nested({**GPT2, **options}))
    assert message in str(refused.value)


def test_a_model_without_a_vocabulary_cannot_be_built() -> None:
    options = GptOptions(num_layers=1, hidden_size=8, num_heads=1)
    with pytest.raises(ValueError, match="vocab_size is unset"):
        Gpt(single_process_context(options), options)
