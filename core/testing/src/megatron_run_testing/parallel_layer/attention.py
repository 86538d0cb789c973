"""Attention cores with their inputs, what each needs of a factory, and their oracle.

Legend: s sequence, c keys, those of earlier tokens among them, b micro batch, n heads, k key-value heads, d head size,
t tensor-parallel size. Here s = 8, b = 2, n = 8, k = 4, d = 4, so that heads divide by 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_run.contracts import AttentionCore, AttentionShape
from megatron_run.contracts.parallel_layer import VARIANTS
from megatron_run_testing.parallel_layer.cases import BATCH, Case, always, random_values
from megatron_run_testing.parallel_layer.member import LENGTH, features, heads, whole

_SHAPE = AttentionShape(heads=8, kv_heads=4, head_size=4, layer=0)
#: Values of all variants that matter among scores of about 1 and 8 tokens.
_VARIED = replace(_SHAPE, scale=0.9, window=4, softcap=0.7)
#: The variant that matters to documents and caches, since it hides keys as they do.
_WINDOW = replace(_SHAPE, window=_VARIED.window)
#: Each variant alone, and all together, which take other ways through an implementation.
_SHAPES = {
    "with a scale of its own": replace(_SHAPE, scale=_VARIED.scale),
    "with a window": _WINDOW,
    "with capped scores": replace(_SHAPE, softcap=_VARIED.softcap),
    "with scale, window and cap": _VARIED,
}
assert _VARIED.variants == set(VARIANTS), "every variant is compared"


def attentions() -> Iterator[Case]:
    """All cases; inputs are equal in every process."""
    for name, mask in _masks().items():
        yield _case(name, _SHAPE, mask)
    yield _case("attention core without sharing of heads", replace(_SHAPE, kv_heads=_SHAPE.heads), None)
    for how, shape in _SHAPES.items():
        yield _case(f"attention core {how}", shape, None)
    yield _case("attention core with padded keys and all variants", _VARIED, _padding() & _causal())
    documents = torch.tensor([[0, 3, LENGTH, LENGTH], [0, 1, 5, LENGTH]])
    for how, shape in {"": _SHAPE, "with a window": _WINDOW, "and has all variants": _VARIED}.items():
        yield _case(f"attention core that packs documents {how}".rstrip(), shape, None, documents)
    yield from _decoding()


def _masks() -> dict[str, Tensor | None]:
    return {
        "attention core": None,
        "attention core that sees both ways": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool),
        "attention core with padded keys": _padding(),
        "attention core with padded keys, causal": _padding() & _causal(),  # [b, 1, s, s]
    }


def _padding() -> Tensor:
    """The keys that are not padding, [b, 1, 1, s]: the second sample has 5 tokens."""
    return torch.arange(LENGTH) < torch.tensor([LENGTH, 5])[:, None, None, None]


def _causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def _decoding() -> Iterator[Case]:
    """The last tokens read the keys and values of all, as while texts are generated: without a backward."""
    padded = torch.arange(LENGTH) >= torch.tensor([0, 2])[:, None, None, None]  # of texts that end together
    yield _case("attention core of a token after cached ones", _SHAPE, None, queries=1)
    yield _case("attention core of tokens after cached ones", _SHAPE, None, queries=3)
    yield _case("attention core with a window of tokens after cached ones", _WINDOW, None, queries=3)
    yield _case("attention core with all variants of a token after cached ones", _VARIED, None, queries=1)
    yield _case("attention core of a token after padded ones", _SHAPE, padded, queries=1)
    yield _case("attention core of tokens after padded ones", _SHAPE, padded & _causal()[-3:], queries=3)


def _case(
    name: str, shape: AttentionShape, mask: Tensor | None, documents: Tensor | None = None, queries: int = LENGTH
) -> Case:
    """A core of ``shape`` for the last ``queries`` tokens."""
    query, key = (random_values(LENGTH, BATCH, count, shape.head_size) for count in (shape.heads, shape.kv_heads))
    inputs = (query[-queries:], key.flip(2), key.flip(0), mask, documents)
    attributes = ("packs",) * (documents is not None) + ("caches",) * (queries < LENGTH)
    optional = attributes or shape.variants
    count = len(inputs) if documents is not None else 4  # a core that packs nothing takes no documents
    return Case(
        name,
        lambda layers: layers.core_attention(shape, 0.0),
        inputs[:count],
        (heads, heads, heads, whole, whole)[:count],
        features(shape.heads * shape.head_size),
        oracle=always(PlainAttention(shape)),
        learns=queries == LENGTH,
        lacks=(lambda core: _unclaimed(core, shape, attributes)) if optional else None,
    )


def _unclaimed(core: nn.Module, shape: AttentionShape, attributes: tuple[str, ...]) -> str:
    """Which of the variants of ``shape`` and of ``attributes`` a core does not name, empty if it names all."""
    able = AttentionCore.of(core)
    variants = sorted(shape.variants - able.variants)
    missing = [*variants, *(name for name in attributes if not getattr(able, name))]
    return f"its attention does not claim {' and '.join(missing)}" if missing else ""


class PlainAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v, written out (Vaswani et al. 2017), with the variants of ``shape``."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, documents: Tensor | None = None
    ) -> Tensor:
        """Query [s, b, n, d], key and value [c, b, k, d], documents [b, any] -> [s, b, n*d]."""
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * (self.shape.scale or 1 / math.sqrt(query.shape[-1]))
        if self.shape.softcap is not None:
            scores = self.shape.softcap * torch.tanh(scores / self.shape.softcap)
        probabilities = scores.masked_fill(~self._seen(scores, mask, documents), -torch.inf).softmax(-1)
        return torch.einsum("bnqk,kbnd->qbnd", probabilities, value).flatten(2)

    def _seen(self, scores: Tensor, mask: Tensor | None, documents: Tensor | None) -> Tensor:
        """Where the queries of ``scores`` [b, n, s, c] may attend: broadcasts to [b, 1, s, c]."""
        key = torch.arange(scores.shape[3], device=scores.device)
        query = key[-scores.shape[2] :, None]
        seen = key <= query if mask is None else mask
        if self.shape.window is not None:
            seen = seen & (key > query - self.shape.window)
        if documents is not None:
            number = (documents[:, None] <= key[:, None]).sum(-1)  # of the document of each token: [b, c]
            seen = seen & (number[:, None, :, None] == number[:, None, None])
        return seen
