"""The model against transformers' BertForPreTraining, the suite of its kind, and its heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_run.config.values import nested
from megatron_run.contracts import Microbatch
from megatron_run_model_bert import Bert, BertOptions
from megatron_run_testing.build_contexts import example_microbatch, logical_values, single_process_context
from megatron_run_testing.model import Built, build_model

SMALL: dict[str, Any] = {"num_layers": 4, "hidden_size": 24, "num_heads": 4, "ffn_size": 40, "vocab_size": 61}
#: Standard deviation 0.3 makes every path matter.
EXACT = {**SMALL, "dropout": 0.0, "init_std": 0.3}
LENGTH = 16
#: The second row ends after 11 tokens; the rest is padding.
DOCUMENTS = torch.tensor([[0, 16, 16], [0, 11, 16]])
REAL = torch.arange(LENGTH) < torch.tensor([[16], [11]])
PLAIN = frozenset({"tokens", "labels", "loss_mask"})
PAIRS = PLAIN | {"token_types", "documents", "swapped"}


def bert(
    given: dict[str, Any], *, fields: frozenset[str] = PAIRS, length: int = LENGTH, dtype: torch.dtype = torch.float64
) -> tuple[BertOptions, Built]:
    options = BertOptions.model_validate(nested({**EXACT, **given}))
    context = single_process_context(options, dtype=dtype, train={"sequence_length": length})
    context = replace(context, fields=fields)
    built = build_model(lambda context, _: Bert(context, options), context, options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in ((info.name, p) for p, info in built.infos.items()):
            if parameter.ndim == 1 and "head.bias" not in name:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter.dtype), alpha=0.3)
    return options, built


def pairs(length: int = LENGTH) -> Microbatch:
    """Two padded rows of two sentences."""
    generator = torch.Generator().manual_seed(1)
    plain = example_microbatch(61, length=length)
    types = (torch.arange(length) >= torch.tensor([[7], [5]])).long()
    mask = plain.fields["loss_mask"] * REAL
    swapped = torch.randint(2, (2,), generator=generator)
    extra = {"token_types": types, "documents": DOCUMENTS, "swapped": swapped, "loss_mask": mask}
    return replace(plain, fields={**plain.fields, **extra})


def theirs(options: BertOptions, built: Built) -> Any:
    """The same network and weights in transformers, by its names; it has the order ``post`` only."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        intermediate_size=options.ffn_size,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        pad_token_id=None,  # else the word embedding of token 0 gets no gradient
    )
    model = transformers.BertForPreTraining(config).double().eval()
    ours = logical_values(built.infos)
    state = {name: ours[_our_name(name)] for name in model.state_dict() if _our_name(name) in ours}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {
        "bert.embeddings.position_ids",
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
    }
    model.tie_weights()
    assert len(state) == len(ours), "a tensor of ours has no counterpart there"
    return model


def _our_name(theirs: str) -> str:
    renamed = theirs
    for old, new in (
        ("bert.embeddings.word_embeddings", "embedding.word"),
        ("bert.embeddings.position_embeddings", "embedding.position"),
        ("bert.embeddings.token_type_embeddings", "embedding.token_type"),
        ("bert.embeddings.LayerNorm", "embedding.norm"),
        ("bert.encoder.layer.", "layers."),
        ("attention.self.", "attention.qkv."),
        ("attention.output.dense", "attention.output"),
        ("attention.output.LayerNorm", "attention_post_norm"),
        ("intermediate.dense", "mlp.input.up"),
        ("output.dense", "mlp.output"),
        ("output.LayerNorm", "feed_post_norm"),
        ("bert.pooler.dense", "head.pooler.dense"),
        ("cls.seq_relationship", "head.order"),
        ("cls.predictions.transform.dense", "head.dense"),
        ("cls.predictions.transform.LayerNorm", "head.norm"),
        ("cls.predictions.bias", "head.bias.weight"),
    ):
        renamed = renamed.replace(old, new) if not ("mlp" in new and ".attention." in renamed) else renamed
    return renamed


def test_losses_and_gradients_are_those_of_transformers() -> None:
    options, built = bert({"head": "pretraining", "norm.order": "post"})
    model, microbatch = theirs(options, built), pairs()
    fields = microbatch.fields
    found = model(fields["tokens"], attention_mask=REAL.long(), token_type_ids=fields["token_types"])
    lm = F.cross_entropy(found.prediction_logits.permute(0, 2, 1), fields["labels"], reduction="none")
    expected = (lm * fields["loss_mask"]).sum()
    order = F.cross_entropy(found.seq_relationship_logits, fields["swapped"])
    (expected + order).backward()
    losses = built.forward(microbatch)[0].losses
    torch.testing.assert_close(losses["lm"][0], expected.detach(), rtol=1e-9, atol=0)
    torch.testing.assert_close(losses["model/order_loss"][0], order.detach(), rtol=1e-9, atol=0)
    _, gradients = built.step(microbatch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[_our_name(name)], parameter.grad, rtol=1e-8, atol=1e-10, msg=name)


def test_logits_are_those_of_transformers_without_segments_or_padding() -> None:
    options, built = bert({"head": "pretraining", "norm.order": "post"}, fields=PLAIN)
    tokens = pairs().fields["tokens"]
    expected = theirs(options, built)(tokens).prediction_logits
    logits = built.train(mode=False).forward(Microbatch(0, 1, 0, {"tokens": tokens}, train=False))[0].logits
    assert logits is not None
    torch.testing.assert_close(logits[..., :61].transpose(0, 1), expected.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", ["pre", "post"])
def test_what_stands_in_the_padding_changes_nothing(order: str) -> None:
    _, built = bert({"head": "pretraining", "norm.order": order})
    microbatch = pairs()
    tokens = torch.where(REAL, microbatch.fields["tokens"], 60 - microbatch.fields["tokens"])
    changed = replace(microbatch, fields={**microbatch.fields, "tokens": tokens})
    for name, (total, _) in built.forward(microbatch)[0].losses.items():
        torch.testing.assert_close(built.forward(changed)[0].losses[name][0], total, rtol=1e-12, atol=0)
    seen = torch.where(REAL & (torch.arange(LENGTH) == 10), 3, microbatch.fields["tokens"])
    changed = replace(microbatch, fields={**microbatch.fields, "tokens": seen})
    assert not torch.equal(built.forward(changed)[0].losses["lm"][0], built.forward(microbatch)[0].losses["lm"][0])


def test_rows_of_choices_are_computed_as_rows_of_their_own() -> None:
    """Three choices of 8 tokens in a sample are the logits of three samples of 8 tokens with one class."""
    given = {"head": "choice", "choices": 3}
    _, built = bert(given, fields=PLAIN | {"documents"}, length=24)
    tokens = torch.randint(61, (2, 24), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([[0, 8, 8, 13, 16, 22, 24]] * 2)
    whole = {"tokens": tokens, "documents": bounds}
    found = built.train(mode=False).forward(Microbatch(0, 1, 0, whole, train=False))[0].logits
    assert found is not None
    assert found.shape == (1, 2, 3)
    for choice, real in enumerate((8, 5, 6)):
        row = {
            "tokens": tokens[:, 8 * choice : 8 * choice + 8].repeat(1, 3),
            "documents": torch.tensor([[0, real, 8, 8 + real, 16, 16 + real, 24]] * 2),
        }
        alone = built.forward(Microbatch(0, 1, 0, row, train=False))[0].logits
        assert alone is not None
        torch.testing.assert_close(found[..., choice], alone[..., 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "count"),
    [({"head": "classification", "classes": 3}, 2), ({"head": "choice", "choices": 2}, 2), ({"head": "span"}, 4)],
    ids=["classification", "choice", "span"],
)
def test_losses_of_fine_tuning_are_cross_entropies_of_their_logits(given: dict[str, Any], count: int) -> None:
    _, built = bert(given, fields=PLAIN)
    tokens = torch.randint(61, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    labels, mask = torch.zeros(2, LENGTH, dtype=torch.long), torch.zeros(2, LENGTH)
    labels[:, 0], labels[:, 1], mask[:, : count // 2] = torch.tensor([1, 0]), torch.tensor([3, 1]), 1.0
    fields = {"tokens": tokens, "labels": labels, "loss_mask": mask}
    logits = built.forward(Microbatch(0, 1, 0, {"tokens": tokens}))[0].logits
    assert logits is not None
    total, weight = built.forward(Microbatch(0, 1, 0, fields))[0].losses["lm"]
    expected = _log_likelihood(logits, labels, span="span" in given.values())
    torch.testing.assert_close(total, -expected)
    assert weight == built.model.counts(fields)["lm"] == count


def _log_likelihood(logits: Tensor, labels: Tensor, *, span: bool) -> Tensor:
    """By hand: the logarithm of a softmax, at the labels."""
    total = torch.zeros((), dtype=logits.dtype)
    for row, label in enumerate(labels):
        ends = [logits[:, row, end] for end in (0, 1)] if span else [logits[0, row]]
        for end, scores in enumerate(ends):
            total = total + scores[label[end]] - scores.exp().sum().log()
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_lose_what_16_bits_lose(dtype: torch.dtype) -> None:
    given = {"head": "pretraining", "init_std": 0.1}
    exact = bert(given)[1].forward(pairs())[0].losses
    found = bert(given, dtype=dtype)[1].forward(pairs())[0].losses
    for name, (total, weight) in found.items():
        assert total.dtype == torch.float32
        torch.testing.assert_close(total / weight, (exact[name][0] / exact[name][1]).float(), rtol=2e-2, atol=2e-2)


def test_text_is_not_asked_of_it() -> None:
    assert not bert({})[1].model.predicts_next
