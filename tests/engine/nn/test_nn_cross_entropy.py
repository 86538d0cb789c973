"""Cross entropy over a padded vocabulary, of one rank or shared by several."""

from __future__ import annotations

import math
from datetime import timedelta
from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.nn.cross_entropy import cross_entropy
from megatron_run_engine.runtime.comm import ParallelGroup, create_groups
from tests.support.ranks import run_ranks


def test_loss_and_gradient_are_those_of_the_real_columns() -> None:
    logits, labels = torch.randn(9, 16).double(), torch.randint(11, (9,))
    weights = torch.randn(9).double()
    plain, padded = logits[:, :11].clone().requires_grad_(), logits.clone().requires_grad_()
    expected = F.cross_entropy(plain, labels, reduction="none")
    found = cross_entropy(padded, labels, 11)
    torch.testing.assert_close(found, expected)
    expected.backward(weights)
    found.backward(weights)
    assert padded.grad is not None
    torch.testing.assert_close(padded.grad[:, :11], plain.grad)
    assert not padded.grad[:, 11:].any()


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    logits, labels = torch.randn(3, 6).double().requires_grad_(), torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, labels, 5), (logits,))


def test_large_logits_and_large_padding_neither_overflow_nor_count() -> None:
    logits = torch.tensor([[1e4, -1e4, 1e30], [3e4, 3e4, 1e30]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0, 1]), 2)
    torch.testing.assert_close(loss, torch.tensor([0.0, math.log(2)]))
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_16_bit_logits_give_a_loss_in_fp32_and_a_gradient_in_their_own_dtype() -> None:
    logits, labels = torch.randn(64, 32).bfloat16().requires_grad_(), torch.randint(32, (64,))
    loss = cross_entropy(logits, labels, 32)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), labels, reduction="none"))
    loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_does_not_depend_on_how_many_rows_are_computed_at_a_time(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, weights, found = torch.arange(9), torch.rand(9), []
    values = torch.randn(9, 16).to(dtype)
    for cached in (1, 4 * 16, 2**18):  # one row, four, all
        monkeypatch.setattr(import_module("megatron_run_engine.nn.cross_entropy"), "CACHED", cached)
        logits = values.clone().requires_grad_()
        loss = cross_entropy(logits, labels, 11, 0.1)
        found.append([loss, *torch.autograd.grad(loss, logits, weights)])
    for rows in found[1:]:
        torch.testing.assert_close(rows, found[0])


VOCAB, COLUMNS, TOKENS = 21, 8, 12


#: Logits by kind, and the dtype in which ranks are given them.
KINDS = {
    "plain": torch.float64,
    "extreme": torch.float64,
    "ruled out": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def shared_logits(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, v] in float64, labels [N] that name every rank's columns, and a weight for each token's loss."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(TOKENS, VOCAB, dtype=torch.float64, generator=generator)
    if kind == "extreme":  # the largest logit lies on another rank than the label, and far away
        logits[:, ::5] += 1e4
        logits[::2, 1::7] -= 1e4
    if kind == "ruled out":  # a class of each rank that no label names, and where labels of other ranks may lie
        logits[:, [1, 2, 9, 12, 19]] = -torch.inf
    logits = logits.to(KINDS[kind]).double()  # the oracle sees what the ranks see
    return logits, torch.arange(TOKENS) * 5 % VOCAB, torch.rand(TOKENS, dtype=torch.float64, generator=generator)


def share_losses(rank: int, world: int) -> dict[tuple[str, float], tuple[list[float], list[list[float]]]]:
    """Losses and the gradient of this rank's columns, of which four ranks hold 8, 8, 5 and no real one."""
    topology = Topology(Sizes(tensor=world), rank)
    peers = create_groups(topology, timedelta(seconds=20)).parallel_group(topology, "tensor")
    columns = -(-VOCAB // world) if world < 4 else COLUMNS
    found = {}
    for kind, dtype in KINDS.items():
        for smoothing in (0.0, 0.2):
            logits, labels, weights = shared_logits(kind)
            padded = F.pad(logits, (0, columns * world - VOCAB), value=5e4)
            mine = padded[:, rank * columns : (rank + 1) * columns].to(dtype, copy=True).requires_grad_()
            loss = cross_entropy(mine, labels, VOCAB, smoothing, peers)
            loss.backward(weights.to(loss.dtype))
            assert mine.grad is not None
            assert (loss.dtype, mine.grad.dtype) == (torch.promote_types(dtype, torch.float32), dtype)
            found[kind, smoothing] = loss.tolist(), mine.grad.tolist()
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "world", [2, pytest.param(3, marks=pytest.mark.nightly), 4]
)  # two have padding, and of four one no word
def test_shared_by_ranks_it_is_that_of_one(world: int) -> None:
    ranks = run_ranks(share_losses, world)
    for kind, smoothing in ranks[0]:
        logits, labels, weights = shared_logits(kind)
        expected = F.cross_entropy(logits.requires_grad_(), labels, reduction="none", label_smoothing=smoothing)
        expected.backward(weights)
        for found in ranks:
            assert found[kind, smoothing][0] == ranks[0][kind, smoothing][0]  # to the last bit, on every rank
            losses = torch.tensor(found[kind, smoothing][0]).double()
            torch.testing.assert_close(losses, expected.float().double(), rtol=1e-6, atol=1e-6)
        gradient = torch.cat([torch.tensor(found[kind, smoothing][1], dtype=torch.float64) for found in ranks], 1)
        rounding = max(torch.finfo(KINDS[kind]).eps, 1e-7)
        torch.testing.assert_close(gradient[:, :VOCAB], logits.grad, rtol=rounding, atol=1e-7)
        assert not gradient[:, VOCAB:].any()


@pytest.mark.parametrize("label", [-1, 21, 24])
def test_a_label_that_is_no_class_is_refused(label: int) -> None:
    with pytest.raises(RuntimeError, match=f"index {label} is out of bounds"):
        cross_entropy(torch.randn(2, 24), torch.tensor([3, label]), VOCAB)


@pytest.mark.parametrize("label", [-1, 21, 24])  # the last two would be columns of padding
@pytest.mark.parametrize("rank", range(3))
def test_every_rank_that_shares_the_vocabulary_refuses_it_before_it_talks_to_others(rank: int, label: int) -> None:
    with pytest.raises(RuntimeError, match=f"index {label} is out of bounds"):
        cross_entropy(torch.randn(2, 8), torch.tensor([3, label]), VOCAB, peers=ParallelGroup(rank, 3))


def test_smoothed_it_is_pytorchs_and_its_gradient_the_slope() -> None:
    logits, labels = torch.randn(3, 8).double().requires_grad_(), torch.tensor([0, 4, 2])
    found = cross_entropy(logits, labels, 5, 0.3)
    torch.testing.assert_close(found, F.cross_entropy(logits[:, :5], labels, reduction="none", label_smoothing=0.3))
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, labels, 5, 0.3), (logits,))
