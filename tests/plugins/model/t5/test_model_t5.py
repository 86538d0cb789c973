"""The model against transformers' T5ForConditionalGeneration, with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
import torch
from torch import Tensor

from megatron_run.config.values import nested
from megatron_run.contracts import Microbatch
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import InputError
from megatron_run_engine.runtime.comm import Groups
from megatron_run_model_t5 import T5, T5Options
from megatron_run_testing.build_contexts import (
    context_at,
    example_microbatch,
    logical_values,
    single_process_context,
)
from megatron_run_testing.model import Built, build_model

SMALL: dict[str, Any] = {
    "num_layers": 5,
    "encoder_layers": 2,
    "hidden_size": 24,
    "num_heads": 4,
    "head_size": 10,
    "ffn_size": 40,
    "vocab_size": 61,
    "encoder_length": 48,
    "dropout": 0.0,
    "position_buckets": 16,
    "position_distance": 40,
}
LENGTH = 16
#: The second row of the encoder ends after 37 tokens.
REAL = torch.arange(48) < torch.tensor([[48], [37]])


def t5(given: dict[str, Any], stages: int = 1, *, padded: bool = True) -> tuple[T5Options, Built]:
    options = T5Options.model_validate(nested({**SMALL, **given}))
    extra = {"encoder_tokens", "encoder_mask"} if padded else {"encoder_tokens"}
    context = single_process_context(options, train={"sequence_length": LENGTH})
    context = replace(context, fields=context.fields | extra)
    built = build_model(lambda context, _: T5(context, options), context, options, stages)
    with torch.no_grad():
        for name, parameter in ((info.name, p) for p, info in built.infos.items()):
            if parameter.ndim == 1 or "_bias" in name:  # so that norms and distances matter
                generator = torch.Generator().manual_seed(crc32(name.encode()))  # in any order of the parameters
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    return options, built


def texts() -> Microbatch:
    """Two rows of 48 and 16 tokens."""
    plain = example_microbatch(61, length=LENGTH)
    read = torch.randint(61, (2, 48), generator=torch.Generator().manual_seed(1))
    return replace(plain, fields={**plain.fields, "encoder_tokens": read, "encoder_mask": REAL.long()})


#: Our names in a layer of the encoder and of the decoder, and theirs.
NAMES = {
    "attention.qkv.query": "0.SelfAttention.q",
    "attention.qkv.key": "0.SelfAttention.k",
    "attention.qkv.value": "0.SelfAttention.v",
    "attention.output": "0.SelfAttention.o",
    "attention.qkv.norm": "0.layer_norm",
    "cross.query.query": "1.EncDecAttention.q",
    "cross.key_value.key": "1.EncDecAttention.k",
    "cross.key_value.value": "1.EncDecAttention.v",
    "cross.output": "1.EncDecAttention.o",
    "cross.query.norm": "1.layer_norm",
}
FEEDS = {"input.norm": "layer_norm", "input.up": "DenseReluDense.wi", "output": "DenseReluDense.wo"}
GATED = {**FEEDS, "input.up": "DenseReluDense.wi_1", "input.gate": "DenseReluDense.wi_0"}


def their_name(ours: str, options: T5Options) -> str:
    """The name of one of our tensors in transformers."""
    border = options.first_decoder_layer
    ends = {
        "embedding.word.weight": "shared.weight",
        "embedding.encoder_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "embedding.decoder_bias": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        f"layers.{border - 1}.final_norm.weight": "encoder.final_layer_norm.weight",
        "final_norm.weight": "decoder.final_layer_norm.weight",
        "output.weight": "lm_head.weight",
    }
    if ours in ends:
        return ends[ours]
    _, index, rest = ours.split(".", 2)
    layer, inner = int(index), rest.removesuffix(".weight")
    stack, first, last = ("encoder", 0, 1) if layer < border else ("decoder", border, 2)
    feeds = GATED if options.activation == "geglu_tanh" else FEEDS
    theirs = f"{last}.{feeds[inner[4:]]}" if inner.startswith("mlp.") else NAMES[inner]
    return f"{stack}.block.{layer - first}.layer.{theirs}.weight"


def theirs(options: T5Options, weights: dict[str, Tensor]) -> Any:
    """The same network and weights in transformers."""
    import transformers

    assert options.vocab_size is not None
    config = transformers.T5Config(
        vocab_size=options.vocab_size,
        d_model=options.hidden_size,
        d_kv=options.head_size,
        d_ff=options.spec(LENGTH, options.vocab_size).ffn,
        num_layers=options.first_decoder_layer,
        num_decoder_layers=options.num_layers - options.first_decoder_layer,
        num_heads=options.num_heads,
        relative_attention_num_buckets=options.position_buckets,
        relative_attention_max_distance=options.position_distance,
        dropout_rate=0.0,
        layer_norm_epsilon=options.norm.eps,
        feed_forward_proj="gated-gelu" if options.activation == "geglu_tanh" else "relu",
        tie_word_embeddings=options.tie_embeddings,
    )
    model = transformers.T5ForConditionalGeneration(config).double()
    found = {their_name(name, options): value for name, value in weights.items()}
    if not options.tie_embeddings:  # they know of no such model, but for the scale
        model.lm_head.weight = torch.nn.Parameter(found["lm_head.weight"].clone())
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert not unexpected
    assert all(name.endswith("embed_tokens.weight") or name == "lm_head.weight" for name in missing)
    return model


@contextmanager
def in_float64() -> Iterator[None]:
    """Within, T5 of transformers does not compute its norms and softmaxes in fp32."""
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    def norm(self: Any, x: Tensor) -> Tensor:
        found: Tensor = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return found

    with mock.patch.object(T5LayerNorm, "forward", norm), mock.patch.object(Tensor, "float", lambda x: x):
        yield


@pytest.mark.parametrize("given", [{}, {"activation": "relu", "tie_embeddings": False}], ids=["1.1", "relu, untied"])
def test_losses_logits_and_gradients_are_those_of_transformers(given: dict[str, Any]) -> None:
    """With padding in the encoder, and unlike lengths; the gradients also of a model cut where the decoder begins."""
    options, built = t5(given)
    microbatch = texts()
    fields = microbatch.fields
    other = theirs(options, logical_values(built.infos))
    read = {"input_ids": fields["encoder_tokens"], "attention_mask": fields["encoder_mask"]}
    with in_float64():
        logits = other(**read, decoder_input_ids=fields["tokens"]).logits
    asked = {name: fields[name] for name in ("tokens", "encoder_tokens", "encoder_mask")}
    ours = built.forward(replace(microbatch, fields=asked))[0].logits
    assert ours is not None
    torch.testing.assert_close(ours[..., :61].transpose(0, 1), logits, rtol=1e-10, atol=1e-10)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), fields["labels"], reduction="none")
    loss = (losses * fields["loss_mask"]).sum()
    loss.backward()
    expected = {name: parameter.grad for name, parameter in other.named_parameters()}
    for stages in (1, 5):
        _, cut = t5(given, stages)
        found, gradients = cut.step(microbatch)
        torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[their_name(name, options)], rtol=1e-9, atol=1e-9)


def test_a_mask_without_padding_changes_nothing() -> None:
    microbatch = texts()
    full = {**microbatch.fields, "encoder_mask": torch.ones_like(microbatch.fields["encoder_mask"])}
    padded, plain = (
        t5({}, padded=has)[1].step(replace(microbatch, fields=given))
        for has, given in ((True, full), (False, microbatch.fields))
    )
    torch.testing.assert_close(padded[0], plain[0], rtol=1e-12, atol=0)
    assert t5({})[1].step(microbatch)[0] != plain[0]


def test_padding_is_seen_by_nobody() -> None:
    microbatch = texts()
    tokens = microbatch.fields["encoder_tokens"]
    changed = torch.where(REAL, tokens, (tokens + 1) % 61)
    found = [
        t5({})[1].forward(replace(microbatch, fields={**microbatch.fields, "encoder_tokens": each}))[0].losses["lm"][0]
        for each in (tokens, changed)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("given", "sizes", "sequence", "says"),
    [
        ({"num_heads": 6}, Sizes(tensor=4), False, "model.num_heads=6 does not divide over parallel.tensor=4"),
        ({"encoder_length": 50}, Sizes(tensor=4), True, "model.encoder_length=50 does not divide over parallel.tensor"),
    ],
)
def test_a_split_that_does_not_divide_is_refused(
    given: dict[str, Any], sizes: Sizes, sequence: bool, says: str
) -> None:
    options = T5Options.model_validate(nested({**SMALL, **given}))
    with pytest.raises(InputError, match=says):
        T5(context_at(Topology(sizes, 0), Groups(), options, sequence=sequence), options)


@pytest.mark.parametrize(
    "wrong",
    [{"encoder_layers": 5}, {"position_buckets": 6}, {"position_distance": 8}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_options_that_describe_no_model_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        T5Options.model_validate(nested({**SMALL, **wrong}))
