"""Attention in packed rows: each way of computing it is attention over the documents one by one."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_run_engine.nn import packed_attention
from megatron_run_engine.nn.attention import CoreAttention, fused_attention
from megatron_run_engine.nn.packed_attention import attend_by_lengths, cumulative_lengths, within_documents

#: Long and short documents, alone and together; no token in some; a row of one document.
DOCUMENTS = ((0, 150, 150, 153, 154, 160, 300), (0, 2, 7, 9, 200, 290, 300), (0, 300, 300, 300, 300, 300, 300))


def heads() -> list[Tensor]:
    """Query, key and value of three rows of 300 tokens, four heads on two."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(300, 3, n, 8, generator=generator, dtype=torch.float64).requires_grad_() for n in (4, 2, 2)]


def one_by_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The definition, in loops."""
    out = torch.zeros(300, 3, 4, 8, dtype=torch.float64)
    for row, bounds in enumerate(DOCUMENTS):
        for start, stop in pairwise(bounds):
            q, k, v = (x[start:stop, row].transpose(0, 1) for x in (query, key, value))  # [n, l, d]
            k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
            scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(
                torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1), float("-inf")
            )
            out = out.index_put(
                (torch.arange(start, stop), torch.tensor(row)), (scores.softmax(-1) @ v).transpose(0, 1)
            )
    return out.flatten(2)


def varlen_stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """torch's kernel by its documentation."""
    assert window_size == (-1, 0)
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert int(cu_seq_q.diff().max()) <= max_q == max_k
    found = []
    for start, stop in pairwise(cu_seq_q.tolist()):
        q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value))
        if start < stop:
            found.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa)[0])
    return torch.cat(found, 1).transpose(0, 1)


def by_the_core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    result: Tensor = CoreAttention(0.0)(query, key, value, None, torch.tensor(DOCUMENTS))
    return result


def by_the_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return fused_attention(query, key, value, within_documents(torch.tensor(DOCUMENTS), 300), 0.0)


def by_the_kernel(query: Tensor, key: Tensor, value: Tensor, kernel: Any = varlen_stand_in) -> Tensor:
    with mock.patch.object(packed_attention, "_varlen", return_value=packed_attention._Kernel(kernel)):
        return attend_by_lengths(query, key, value, torch.tensor(DOCUMENTS))


def older(query: Tensor, key: Tensor, value: Tensor, a: Tensor, b: Tensor, c: int, d: int, is_causal: bool) -> Tensor:
    """The kernel of torch 2.10, which knows neither windows nor shared heads."""
    assert is_causal
    assert query.shape[1] == key.shape[1]
    return varlen_stand_in(query, key, value, a, b, c, d, window_size=(-1, 0))


@pytest.mark.parametrize(
    "way",
    [by_the_core, by_the_mask, by_the_kernel, partial(by_the_kernel, kernel=older)],
    ids=["core", "mask", "kernel", "older kernel"],
)
def test_values_and_gradients_are_those_of_the_documents_alone(way: Any) -> None:
    weight = torch.linspace(-1, 1, 300 * 3 * 32, dtype=torch.float64).view(300, 3, 32).sin()
    outputs, gradients = [], []
    for attend in (way, one_by_one):
        inputs = heads()
        outputs.append(attend(*inputs))
        (outputs[-1] * weight).sum().backward()
        gradients.append([x.grad for x in inputs])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-10)


def test_the_kernel_of_this_torch_takes_what_it_is_given() -> None:
    kernel = packed_attention._varlen()
    if kernel is None:
        pytest.skip("torch below 2.10")
    names = {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"}
    assert names < kernel.parameters
    assert {"window_size", "is_causal"} & kernel.parameters


def test_the_number_of_lengths_does_not_depend_on_the_documents() -> None:
    lengths = cumulative_lengths(torch.tensor(DOCUMENTS), 300)
    assert lengths.tolist() == [*DOCUMENTS[0][:-1], *(300 + x for x in DOCUMENTS[1][:-1]), 600, *[900] * 6]
