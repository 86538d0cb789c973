"""The attention core: who may look where, and what is dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_run.nn import CoreAttention


def qkv(length: int = 6, batch: int = 2, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(length, batch, count, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    return query, key, value


def test_padded_keys_are_neither_seen_nor_given_a_gradient() -> None:
    """The second sample is four tokens long: it comes out as if it had never been padded."""
    query, key, value = qkv()
    padding = torch.arange(6) < torch.tensor([6, 4])[:, None, None, None]  # [b, 1, 1, s]
    out = CoreAttention(0.0)(query, key, value, padding)
    short = (x[:4, 1:] for x in (query, key, value))
    everything = torch.ones(4, 4, dtype=torch.bool)
    torch.testing.assert_close(out[:4, 1:], CoreAttention(0.0)(*short, everything))
    out.sum().backward()
    for x in (key, value):
        assert x.grad is not None
        assert not x.grad[4:, 1].any()
        assert x.grad[4:, 0].any()


def test_both_ways_is_neither_causal_nor_masked() -> None:
    query, key, value = qkv()
    core = CoreAttention(0.0)
    both = core(query, key, value, torch.ones(1, 1, 6, 6, dtype=torch.bool))
    torch.testing.assert_close(both[-1], core(query, key, value)[-1])  # the last may look everywhere anyhow
    assert not torch.isclose(both[0], core(query, key, value)[0]).all()


def test_query_heads_share_key_value_heads_in_order() -> None:
    """Query heads 0 and 1 read key-value head 0, so that a rank with half of both has what belongs together."""
    query, key, value = qkv()
    core = CoreAttention(0.0)
    whole = core(query, key, value).unflatten(-1, (4, 8))
    for half in range(2):
        part = core(query[:, :, 2 * half : 2 * half + 2], key[:, :, half : half + 1], value[:, :, half : half + 1])
        torch.testing.assert_close(part.unflatten(-1, (2, 8)), whole[:, :, 2 * half : 2 * half + 2])


def test_probabilities_are_dropped_while_training_alone() -> None:
    query, key, value = qkv()
    core = CoreAttention(0.5)
    still = core.eval()(query, key, value)
    torch.testing.assert_close(still, CoreAttention(0.0)(query, key, value))
    torch.manual_seed(1)
    first = core.train()(query, key, value)
    assert not torch.isclose(first, still).all()
    torch.manual_seed(1)
    torch.testing.assert_close(core(query, key, value), first)
