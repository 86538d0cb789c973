"""The options of dense decoders: over tensor-parallel ranks, token by token, in packed rows, recomputed, captured."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_run.config.values import nested
from megatron_run.contracts import AttentionShape, Decoding, Microbatch, ParamInfo, StackedLayers
from megatron_run.contracts.schedule import Place
from megatron_run.errors import InputError
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.nn.attention import CoreAttention
from megatron_run_engine.nn.key_value_cache import KeyValueCache
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_testing.build_contexts import (
    example_microbatch,
    logical_values,
    single_process_context,
)
from megatron_run_testing.model import Built, build_model
from tests.plugins.graph_bench import Pipeline
from tests.support import plain_gpt
from tests.support.decoders import DECODERS
from tests.support.ranks import run_ranks
from tests.support.tensor_layers import gpt_context, rank_of, split_gpt

VOCAB = 61
SMALL: Mapping[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": None,
    "vocab_size": VOCAB,
    "init_std": 0.3,
    "dropout": 0.0,
}


def options_of(name: str) -> GptOptions:
    return GptOptions.model_validate(nested({**SMALL, **DECODERS[name]}))


def built(name: str, **train: Any) -> Built:
    options = options_of(name)
    context = single_process_context(options, train=train)
    made = build_model(lambda context, _: Gpt(context, options), context, options)
    spread(made.infos)
    return made


@torch.no_grad()
def spread(infos: Mapping[Parameter, ParamInfo]) -> None:
    """Move norms and biases off their initial values: the same everywhere, whoever holds which part."""
    for parameter, info in infos.items():
        for part in info.parts if parameter.ndim == 1 else ():
            generator = torch.Generator().manual_seed(zlib.crc32(part.name.encode()))
            moved = 0.3 * torch.randn(part.shape, generator=generator, dtype=torch.float64)
            parameter[part.local.start : part.local.stop] += moved[part.start : part.start + len(part.local)]


def on_tensor_ranks(rank: int, world: int) -> dict[str, tuple[float, dict[str, list[float]]]]:
    """By model and whether the sequence is split: the loss, and gradients of this rank's part of every tensor."""
    topology, groups = rank_of(rank, world)
    found = {}
    for name in DECODERS:
        for sequence in (False, True):
            context = gpt_context(topology, groups, {**SMALL, **DECODERS[name]}, sequence=sequence)
            made = split_gpt(context)
            spread(made.infos)
            loss, _ = made.step(example_microbatch(VOCAB))
            gradients: dict[str, Any] = {}
            for parameter, info in made.infos.items():
                total = main_grad(parameter)
                total = groups.sum_(total, info.partial_over) if info.partial_over else total
                for part in info.parts:
                    rows = total[part.local.start : part.local.stop]
                    gradients[part.name] = (part.start, part.column, rows.tolist())
            found[f"{name}, {sequence=}"] = (float(loss), gradients)
    return found


@pytest.mark.multiproc
def test_tensor_parallel_ranks_compute_what_one_rank_does() -> None:
    on_ranks = run_ranks(on_tensor_ranks, 2)
    for name in DECODERS:
        loss, gradients = built(name).train(mode=True).step(example_microbatch(VOCAB))
        for sequence in (False, True):
            for found in on_ranks:
                theirs, parts = found[f"{name}, {sequence=}"]
                assert theirs == pytest.approx(float(loss))
                assert parts.keys() == gradients.keys()
                for tensor, (start, column, rows) in parts.items():
                    part = torch.tensor(rows, dtype=torch.float64)
                    if not len(part):  # of a small vocabulary one rank holds all
                        continue
                    mine = gradients[tensor][start : start + len(part)]
                    mine = mine[:, column : column + part.shape[1]] if mine.ndim > 1 else mine
                    torch.testing.assert_close(part, mine, msg=f"{tensor} of {name}, {sequence=}")


@pytest.mark.parametrize("name", DECODERS)
def test_texts_read_token_by_token_have_the_logits_of_the_whole(name: str) -> None:
    made, tokens = built(name).train(mode=False), example_microbatch(VOCAB).fields["tokens"]
    expected = plain_gpt.logits(logical_values(made.infos), tokens, options_of(name))
    caches: dict[int, KeyValueCache] = {}
    columns = []
    with torch.no_grad():
        for first, stop in ((0, 3), (3, 4), (4, 10), *((each, each + 1) for each in range(10, 16))):
            decoding = Decoding(first=first, caches=caches)
            fields = {"tokens": tokens[:, first:stop]}
            columns.append(made.forward(Microbatch(0, 1, 0, fields, train=False, decoding=decoding))[0].logits)
    found = torch.cat([each for each in columns if each is not None])[..., :VOCAB].transpose(0, 1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", DECODERS)
def test_documents_of_a_packed_row_compute_what_they_do_alone(name: str) -> None:
    options, bounds = options_of(name), (0, 5, 6, 16)
    context = replace(
        single_process_context(options), fields=frozenset({"tokens", "labels", "loss_mask", "positions", "documents"})
    )
    made = build_model(lambda context, _: Gpt(context, options), context, options).train(mode=False)
    tokens = example_microbatch(VOCAB).fields["tokens"][:1]
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(bounds)])
    fields = {"tokens": tokens, "positions": positions[None], "documents": torch.tensor([bounds])}
    with torch.no_grad():
        found = made.forward(Microbatch(0, 1, 0, fields, train=False))[0].logits
    assert found is not None
    weights = logical_values(made.infos)
    for start, stop in pairwise(bounds):
        alone = plain_gpt.logits(weights, tokens[:, start:stop], options)
        torch.testing.assert_close(found[start:stop, :, :VOCAB].transpose(0, 1), alone)


@pytest.mark.parametrize("recompute", ["full", ("core_attn",), ("attn",), ("mlp",)], ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_recomputation_changes_no_bit(name: str, recompute: Any) -> None:
    expected, found = (
        built(name, recompute=each).train(mode=True).step(example_microbatch(VOCAB)) for each in ("none", recompute)
    )
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][tensor], gradient) for tensor, gradient in expected[1].items())


@pytest.mark.parametrize("name", DECODERS)
def test_captured_layers_leave_the_bits_of_eager_ones(name: str) -> None:
    model = options_of(name).model_copy(update={"dropout": 0.1, "num_layers": 4})
    eager, captured = (Pipeline(OneForwardOneBackward(), 2, stages=2, model=model) for _ in range(2))
    assert eager.step(1).equals(captured.step(1))
    assert all(size.regions for size in captured.start_capture())
    for number in (2, 3):
        assert eager.step(number).equals(captured.step(number))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("columns", [40, 300])
def test_windows_and_caps_are_the_same_by_every_way_of_attention(columns: int, dropout: float) -> None:
    """300 columns are more than a block of queries, and more than the products are used for without dropout."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(columns, 2, heads, 4, generator=generator).double() for heads in (4, 2, 2))
    shape = AttentionShape(4, 2, 4, 0, scale=0.7, window=9, softcap=3.0)
    for each in (shape, replace(shape, softcap=None)):
        core = CoreAttention.shaped(each, dropout).train(mode=False)
        keys, values = (x.repeat_interleave(2, dim=2) for x in (key, value))
        scores = 0.7 * torch.einsum("sbnd,cbnd->bnsc", query, keys)
        scores = scores if each.softcap is None else 3 * torch.tanh(scores / 3)
        rows, places = torch.arange(columns)[:, None], torch.arange(columns)
        hidden = (places > rows) | (places <= rows - 9)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        expected = torch.einsum("bnsc,cbnd->sbnd", weights, values).flatten(2)
        torch.testing.assert_close(core(query, key, value), expected)
        torch.testing.assert_close(core(query[-3:], key, value), expected[-3:])
        torch.testing.assert_close(core(query[-1:], key, value), expected[-1:])
        everything = torch.ones(1, 1, columns, columns, dtype=torch.bool).tril()
        torch.testing.assert_close(core(query, key, value, everything), expected)


class PlainCore(nn.Module):
    """Attention of a factory that knows no variants."""

    def forward(self, query: Tensor, *_: Tensor) -> Tensor:
        return query.flatten(2)


class PlainLayers(StackedLayers):
    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        return PlainCore()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention.window": 4}, "model.attention.window"),
        ({"attention.softcap": 4.0}, "model.attention.softcap"),
        ({"attention.scale": 4.0}, "model.attention.scale"),
    ],
)
def test_layers_that_do_not_know_an_option_are_refused_when_they_are_built(options: dict[str, Any], said: str) -> None:
    made = GptOptions.model_validate(nested({**SMALL, **options}))
    context = single_process_context(made)
    with pytest.raises(InputError) as refused:
        Gpt(context, made).build_chunk(0, (Place(0, 0, range(3)),), PlainLayers(DenseLayers(context)), {})
    assert said in str(refused.value)


class PlainNorms(StackedLayers):
    def norm(self, kind: str, size: int, eps: float = 1e-5) -> nn.Module:
        return self.base.norm("rmsnorm", size, eps)


def test_a_factory_whose_norms_know_no_one_plus_weight_is_refused() -> None:
    made = GptOptions.model_validate(nested({**SMALL, "norm.kind": "rmsnorm_1p"}))
    context = single_process_context(made)
    with pytest.raises(InputError, match=r"model\.norm\.kind=rmsnorm_1p"):
        Gpt(context, made).build_chunk(0, (Place(0, 0, range(3)),), PlainNorms(DenseLayers(context)), {})


def _gpt(options: GptOptions, context: BuildContext, _: object) -> Gpt:
    return Gpt(context, options)


def test_the_chunked_loss_scales_logits_too() -> None:
    losses = []
    for chunks in (1, 4):
        options = GptOptions.model_validate(nested({**SMALL, "logits_scale": 0.4, "loss_chunks": chunks}))
        made = build_model(partial(_gpt, options), single_process_context(options), options)
        losses.append(made.train(mode=True).step(example_microbatch(VOCAB)))
    torch.testing.assert_close(losses[0][0], losses[1][0])
    for name, gradient in losses[0][1].items():
        torch.testing.assert_close(losses[1][1][name], gradient)
