"""The attention core: who may look where, what is dropped, and both ways to compute it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_run_engine.nn import CoreAttention
from megatron_run_engine.nn.attention import fused_attention, matmul_attention, matmuls_are_faster

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
LENGTH, BATCH, SIZE = 6, 2, 8
PADDING = torch.arange(LENGTH) < torch.tensor([LENGTH, 4])[:, None, None, None]  # [b, 1, 1, s]: the second is shorter
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
MASKS = {
    "causal": None,
    "causal by a mask": CAUSAL,
    "padded": PADDING,
    "padded and causal": PADDING & CAUSAL,
    "both ways": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool),
}
both_ways = pytest.mark.parametrize("attend", [fused_attention, matmul_attention])


def qkv(heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Strided as a layer hands them over: parts of one tensor [s, b, (n + 2k) * d]."""
    generator = torch.Generator().manual_seed(2)
    fused = torch.randn(LENGTH, BATCH, (heads + 2 * kv_heads) * SIZE, generator=generator, dtype=torch.float64)
    parts = fused.to(dtype).split([count * SIZE for count in (heads, kv_heads, kv_heads)], -1)
    query, key, value = (part.unflatten(-1, (-1, SIZE)).detach().requires_grad_() for part in parts)
    return query, key, value


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v head by head, in float64."""
    query, key, value = (x.double() for x in (query, key, value))
    visible = (CAUSAL if mask is None else mask).expand(BATCH, 1, LENGTH, LENGTH)
    outputs = []
    for head in range(query.shape[2]):
        shared = head // (query.shape[2] // key.shape[2])
        scores = torch.einsum("qbd,kbd->bqk", query[:, :, head], key[:, :, shared]) / math.sqrt(SIZE)
        probabilities = scores.masked_fill(~visible[:, 0], -torch.inf).softmax(-1)
        outputs.append(torch.einsum("bqk,kbd->qbd", probabilities, value[:, :, shared]))
    return torch.cat(outputs, -1)


def output_and_gradients(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], *rest: object) -> list[Tensor]:
    out = attend(*inputs, *rest)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, inputs, weights)]


@both_ways
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_output_and_gradients_are_those_of_the_formula(attend: Attend, mask: str, kv_heads: int) -> None:
    inputs = qkv(4, kv_heads)
    found = output_and_gradients(attend, inputs, MASKS[mask], 0.0)
    torch.testing.assert_close(found, output_and_gradients(plain, inputs, MASKS[mask]))


@both_ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_stay_close_to_the_formula(attend: Attend, dtype: torch.dtype) -> None:
    """Within a few roundings of the largest value; in that type, of strided inputs."""
    inputs = qkv(dtype=dtype)
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    expected = output_and_gradients(plain, exact, PADDING)
    for one, other in zip(output_and_gradients(attend, inputs, PADDING, 0.0), expected, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).abs().max() < 4 * torch.finfo(dtype).eps * other.abs().max()


@both_ways
def test_a_query_that_may_look_nowhere_gets_zeros(attend: Attend) -> None:
    """No NaN, and nothing flows back through it."""
    query, key, value = qkv()
    nothing = CAUSAL.clone()
    nothing[2] = False
    out, *gradients = output_and_gradients(attend, (query, key, value), nothing, 0.0)
    assert not out[2].any()
    assert not gradients[0][2].any()
    seen = torch.arange(LENGTH) != 2
    torch.testing.assert_close(out[seen], plain(query, key, value, None)[seen])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_blocks_of_queries_see_what_one_of_all_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 and 2 queries, and of one each, against one block."""
    found = []
    for block in (LENGTH, 4, 1):
        monkeypatch.setattr("megatron_run_engine.nn.attention.BLOCK", block)
        found.append(output_and_gradients(matmul_attention, qkv(), None, 0.0))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


def test_padded_keys_are_neither_seen_nor_given_a_gradient() -> None:
    """The second sample is four tokens long: it comes out as if it had never been padded."""
    query, key, value = qkv()
    out = CoreAttention(0.0)(query, key, value, PADDING)
    short = (x[:4, 1:] for x in (query, key, value))
    everything = torch.ones(4, 4, dtype=torch.bool)
    torch.testing.assert_close(out[:4, 1:], CoreAttention(0.0)(*short, everything))
    for gradient in torch.autograd.grad(out.sum(), (key, value)):
        assert not gradient[4:, 1].any()
        assert gradient[4:, 0].any()


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


def test_as_many_probabilities_are_dropped_as_asked_and_the_others_grow() -> None:
    """All values are 1 and queries look both ways: an output is the share of probabilities kept, over 1 - p."""
    x = torch.ones(64, 4, 4, SIZE)
    torch.manual_seed(1)
    out = matmul_attention(x, x, x, torch.ones(64, 64, dtype=torch.bool), 0.25)
    assert out.mean() == pytest.approx(1, abs=0.01)
    assert out.std() == pytest.approx(math.sqrt(0.25 / 0.75 / 64), rel=0.1)


def test_the_way_follows_from_device_type_length_and_dropout() -> None:
    def faster(dtype: torch.dtype, length: int, dropout: float, device: str = "cpu") -> bool:
        return matmuls_are_faster(torch.empty(length, 1, 1, SIZE, dtype=dtype, device=device), dropout)

    for dtype in (torch.float32, torch.bfloat16):
        assert faster(dtype, 8 * SIZE, 0.0)
        assert not faster(dtype, 8 * SIZE + 1, 0.0)
        assert faster(dtype, 8 * SIZE + 1, 0.1)
        assert not faster(dtype, 2, 0.1, "meta")
    assert not faster(torch.float16, 2, 0.1)
