"""Heads whose scores are above the limit shrink to it; which do, a reference in float64 finds too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_run.contracts import AttentionShape
from megatron_run.errors import InputError, Problems
from megatron_run.planning import load_config
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_engine.nn.attention import CoreAttention
from megatron_run_testing.build_contexts import example_microbatch
from tests.support.forked import run_forked, tiny
from tests.support.training_bench import Bench

VOCAB = 61
SHAPES = {
    "causal": AttentionShape(4, 4, 6, 0),
    "grouped, scaled": AttentionShape(6, 2, 5, 0, scale=0.3),
    "a window": AttentionShape(4, 2, 6, 0, window=9),
    "packed": AttentionShape(4, 2, 6, 0),
}
#: One layer, since what clips one changes what the next one reads.
SETS = (
    "model.num_layers=1",
    "model.num_heads=4",
    f"data.vocab_size={VOCAB}",
    "model.init_std=0.8",
    "train.sequence_length=16",
    "train.global_batch_size=2",
)
LATENT = ("kv_rank=12", "query_rank=9", "rope_head_size=4", "nope_head_size=6", "value_head_size=8")


def scores(query: Tensor, key: Tensor, shape: AttentionShape, bounds: Tensor | None = None) -> Tensor:
    """Query [s, b, n, d] and key [s, b, k, d] -> [n] in float64, written out."""
    key = key.repeat_interleave(query.shape[2] // key.shape[2], 2)
    products = torch.einsum("qbnd,kbnd->nbqk", query.double(), key.double()) * (shape.scale or shape.head_size**-0.5)
    column = torch.arange(len(query))
    seen = (column <= column[:, None]) & (column > column[:, None] - (shape.window or len(query)))
    if bounds is not None:
        number = (bounds[:, None] <= column[:, None]).sum(-1)  # of the document of each token: [b, s]
        seen = seen & (number[:, :, None] == number[:, None])
    return products.masked_fill(~seen, -torch.inf).amax((1, 2, 3))


@pytest.mark.parametrize("name", SHAPES)
def test_the_largest_scores_are_of_what_a_token_sees(name: str) -> None:
    shape, length = SHAPES[name], 150  # more than a block of queries
    generator = torch.Generator().manual_seed(1)
    # What is hidden is large: it would be found first.
    size = torch.linspace(1, 3, length)[:, None, None, None]
    query = torch.randn(length, 2, shape.heads, shape.head_size, generator=generator)
    key = torch.randn(length, 2, shape.kv_heads, shape.head_size, generator=generator) * size
    bounds = torch.tensor([[0, 3, 40, 150], [0, 131, 131, 150]]) if name == "packed" else None
    found = CoreAttention.shaped(shape, 0.0).largest_scores(query, key, None, bounds)
    torch.testing.assert_close(found.double(), scores(query, key, shape, bounds), rtol=1e-5, atol=0)


class Clipped:
    """A model of one layer, one text that it reads, and the scores that a reference finds in it."""

    def __init__(self, folder: Path, limit: float, *sets: str, plugins: tuple[str, ...] = ()) -> None:
        self.bench = Bench(folder, *SETS, f"model.attention.qk_clip={limit}", *sets, plugins=plugins)
        self._text = example_microbatch(VOCAB)
        self.run = self.bench.assembly

    def read(self) -> Tensor:
        """Let it read the text in training; its scores [n]."""
        found: list[Tensor] = []
        forward = CoreAttention.forward

        def watched(core: CoreAttention, query: Tensor, key: Tensor, *others: Any) -> Tensor:
            found.append(scores(query.detach(), key.detach(), AttentionShape(4, 4, query.shape[-1], 0)))
            return forward(core, query, key, *others)

        with mock.patch.object(CoreAttention, "forward", watched):
            self.run.chunks[0](None, self._text)
        return found[0]

    def update(self, *, skipped: bool = False) -> None:
        """End a step whose gradients are zero."""
        optimizer = self.run.optimizer
        optimizer.zero_grad()
        optimizer.finish_grad_sync()
        self.run.model.before_update(skipped=skipped)
        if not skipped:
            optimizer.step(0.0, 0.0)
            optimizer.start_param_sync()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_heads_above_the_limit_shrink_to_it_and_no_other_does(tmp_path: Path, rule: str, biased: bool) -> None:
    sets = (f"model.bias={biased}", f"optimizer.rule={rule}")
    before = Clipped(tmp_path, 1e9, *sets).read()
    limit = float(before.median()) * 1.01  # above the second of four
    clipped = Clipped(tmp_path, limit, *sets)
    torch.testing.assert_close(clipped.read(), before, rtol=0, atol=0)
    clipped.update()
    expected = before.clamp(max=limit)
    assert 0 < int((expected < before).sum()) < 4
    torch.testing.assert_close(clipped.read(), expected, rtol=1e-5, atol=0)


def test_latent_heads_shrink_where_one_key_serves_all(tmp_path: Path) -> None:
    sets = tuple(f"model.{each}" for each in LATENT)
    before = Clipped(tmp_path, 1e9, *sets, plugins=("model=deepseek",)).read()
    limit = float(before.median()) * 1.01
    clipped = Clipped(tmp_path, limit, *sets, plugins=("model=deepseek",))
    clipped.read()
    clipped.update()
    torch.testing.assert_close(clipped.read(), before.clamp(max=limit), rtol=1e-4, atol=0)


def test_heads_that_share_keys_shrink_together(tmp_path: Path) -> None:
    before = Clipped(tmp_path, 1e9, "model.num_kv_heads=2").read()
    limit = float(before.amax()) * 0.7
    clipped = Clipped(tmp_path, limit, "model.num_kv_heads=2")
    clipped.read()
    clipped.update()
    shared = before.view(2, 2).amax(1, keepdim=True)
    expected = (before.view(2, 2) * (limit / shared).clamp(max=1)).flatten()
    torch.testing.assert_close(clipped.read(), expected, rtol=1e-5, atol=0)


def test_a_skipped_step_shrinks_nothing_and_its_scores_are_forgotten(tmp_path: Path) -> None:
    clipped = Clipped(tmp_path, 1e-3)
    before = clipped.read()
    clipped.update(skipped=True)
    clipped.update()  # nothing was read since
    torch.testing.assert_close(clipped.read(), before, rtol=0, atol=0)
    clipped.update()
    assert float(clipped.read().amax()) < 1.01e-3 < float(before.amax())


REFUSED = {
    "other layers": ((), ("parallel-layer=dense+lora",), r"qk_clip scales weights, and parallel-layer=lora freezes"),
    "a cap": (("model.attention.softcap=2",), (), r"with attention\.softcap scores do not follow the size of weights"),
    "a norm": (("model.attention.qk_norm=head",), (), r"with attention\.qk_norm scores do not follow"),
    "graphs": ((), ("graph-capture=partial,scope=attn",), r"qk_clip keeps the largest scores of a step"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_clipped_is_refused_by_name(name: str) -> None:
    sets, plugins, message = REFUSED[name]
    with pytest.raises((InputError, Problems), match=message):
        model_size(load_config("preset:tiny", sets=("model.attention.qk_clip=1", *sets), plugins=plugins))


def test_a_core_and_an_optimizer_that_have_no_part_in_it_are_refused_by_name() -> None:
    run = load_config("preset:tiny", sets=("model.attention.qk_clip=1",))
    with (
        mock.patch.object(CoreAttention, "tells_scores", new=False),
        pytest.raises(InputError, match=r"qk_clip needs the largest scores, which CoreAttention does not tell"),
    ):
        model_size(run)
    with (
        mock.patch("megatron_run_engine.optim.FlatOptimizer.scales_rows", new=False),
        pytest.raises(InputError, match=r"optimizer=adamw does not scale rows after an update, as layers\.0"),
    ):
        model_size(run)


@pytest.mark.multiproc
def test_the_largest_score_is_that_of_all_heads_samples_and_layers_on_however_many_ranks(tmp_path: Path) -> None:
    sets = {"model.attention.qk_clip": 1e9, "train.global_batch_size": 4, "train.steps": 2}
    split = {**sets, "parallel.tensor": 2, "parallel.pipeline": 2}
    found: list[list[float]] = []
    for name, (request_sets, plugins, ranks) in {
        "one": (sets, (), 1),
        "split": (split, ("schedule=1f1b", "parallel-layer=tensor"), 8),
    }.items():
        assert run_forked(tiny(tmp_path / name, request_sets, plugins, nproc=ranks), timeout=200).code == 0
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found.append([row["extra"]["model/largest_score"] for row in rows if "loss" in row])
    assert len(found[0]) == 2
    assert found[1] == pytest.approx(found[0], rel=1e-5)
