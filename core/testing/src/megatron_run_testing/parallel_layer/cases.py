"""Every layer with its inputs, the split of both over ranks, and its oracle.

The oracle of adapters is the dense layer with merged matrices, and from its gradients those of both factors. For
W' = W + scale * B A, the chain rule gives dB = scale * dW' A^T and dA = scale * B^T dW'; dW = dW'.

Legend: s sequence, b micro batch, h hidden, n heads, k key-value heads, d head size, v vocabulary, t tensor-parallel
size. Here s = 8, b = 2, h = 8, n = 8, k = 4, d = 4, so that all divide by 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import AttentionShape, Init, LinearPart, ParallelLayers, ParamInfo, Part
from megatron_run_engine.runtime.parameter_init import initialise
from megatron_run_testing.parallel_layer.member import (
    HIDDEN,
    INIT,
    LENGTH,
    VOCAB,
    Cut,
    features,
    heads,
    tokens,
    vocabulary,
    whole,
)

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Adapters

Make = Callable[[ParallelLayers], nn.Module]

BATCH, HEADS, KV_HEADS, SIZE = 2, 8, 4, 4
_QKV = (LinearPart("query", 16), LinearPart("key", 8), LinearPart("value", 8))


@dataclass(frozen=True)
class Factors:
    """B [o, r] and A [r, i] of one matrix [o, i], and their names."""

    up: str
    down: str
    b: Tensor
    a: Tensor


def factors(
    infos: Mapping[Parameter, ParamInfo], adapters: Adapters, names: Collection[str], seed: int, init: Init
) -> dict[str, Factors]:
    """The factors of the matrices in ``infos`` that ``names`` say are adapted, by the names of these matrices."""
    found: dict[str, Factors] = {}
    for part in (part for info in infos.values() for part in info.parts):
        stem = part.name.removesuffix(".weight")
        up, down = f"{stem}.{adapters.up}.weight", f"{stem}.{adapters.down}.weight"
        if stem != part.name and up in names:
            outputs, inputs = part.shape
            b = _filled(up, (outputs, adapters.rank), seed, init)
            found[part.name] = Factors(up, down, b, _filled(down, (adapters.rank, inputs), seed, init))
    return found


def merge(infos: Mapping[Parameter, ParamInfo], made: Mapping[str, Factors], scale: float) -> None:
    """Add the factors to the matrices of one rank that holds all of them."""
    with torch.no_grad():
        for parameter, info in infos.items():
            for part in info.parts:
                if part.name in made:
                    rows = parameter[part.local.start : part.local.stop]
                    rows += (scale * made[part.name].b @ made[part.name].a).to(rows)


def gradients(made: Factors, of_merged: Tensor, scale: float) -> Iterator[tuple[str, Tensor]]:
    """The names and gradients of both factors, from that of their merged matrix [o, i]."""
    yield made.up, scale * of_merged @ made.a.t()
    yield made.down, scale * made.b.t() @ of_merged


def _filled(name: str, shape: tuple[int, int], seed: int, init: Init) -> Tensor:
    """The values that a trial gives the logical tensor ``name``, as the engine does, in float64."""
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=torch.float64))
    whole = ParamInfo(name, (Part(name, shape, range(shape[0])),), init, decay=True)
    initialise({parameter: whole}, seed)
    return parameter.detach()


@dataclass(frozen=True)
class Case:
    """One layer: ``make`` creates it from a factory, and ``cuts`` select a rank's part of each of ``inputs``.

    ``leaves`` selects the rank's part of the output, whose pieces are ``parts``. The expected output is that of
    ``oracle`` or, if it is None, of the dense factory's layer. ``training`` is the layer's mode.
    """

    name: str
    make: Make
    inputs: tuple[Tensor | None, ...]
    cuts: tuple[Cut, ...]
    leaves: Cut
    parts: tuple[LinearPart, ...] = ()
    oracle: nn.Module | None = None
    training: bool = True


def cases() -> tuple[Case, ...]:
    """All cases; inputs are equal in every process."""
    return (*_linears(), *_experts(), *_ends(), *_norms(), *_attentions(), *_cross_entropies())


def _linears() -> Iterator[Case]:
    x, cut = _random(LENGTH, BATCH, HIDDEN), features(*(part.features for part in _QKV))
    for name, make in {
        "column linear of three parts": lambda f: f.column_linear(HIDDEN, _QKV, bias=True, init=INIT),
        "column linear after a layer norm": lambda f: f.column_linear(
            HIDDEN, _QKV, bias=True, init=INIT, norm=f.norm("layernorm", HIDDEN)
        ),
        "column linear after a root-mean-square norm": lambda f: f.column_linear(
            HIDDEN, _QKV, bias=False, init=INIT, norm=f.norm("rmsnorm", HIDDEN)
        ),
    }.items():
        yield Case(name, make, (x,), (tokens,), cut, _QKV)
    one = (LinearPart("up", 12),)
    yield Case(
        "column linear without bias",
        lambda f: f.column_linear(HIDDEN, one, bias=False, init=INIT),
        (x,),
        (tokens,),
        features(12),
        one,
    )
    for name, make in {
        "row linear": lambda f: f.row_linear(HIDDEN, 12, bias=True, init=INIT),
        "row linear without bias": lambda f: f.row_linear(HIDDEN, 12, bias=False, init=INIT),
    }.items():
        yield Case(name, make, (x,), (features(HIDDEN),), tokens)


def _experts() -> Iterator[Case]:
    x = _random(LENGTH, BATCH, HIDDEN)
    for name, bias in {"experts in a region": True, "experts without bias": False}.items():
        yield Case(name, partial(_Experts, bias=bias), (x,), (tokens,), tokens)


def _ends() -> Iterator[Case]:
    spread = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 19 % VOCAB  # some of every rank's rows
    yield Case(
        "vocabulary embedding", lambda f: f.vocab_embedding(VOCAB, HIDDEN, init=INIT), (spread,), (whole,), tokens
    )
    x = _random(LENGTH, BATCH, HIDDEN)
    yield Case("output layer", lambda f: f.output_layer(VOCAB, HIDDEN, init=INIT), (x,), (tokens,), vocabulary)
    yield Case("output layer with the embedding's weight", _tied, (spread,), (whole,), vocabulary)


def _norms() -> Iterator[Case]:
    x = _random(LENGTH, BATCH, HIDDEN)
    yield Case("layer norm", lambda f: f.norm("layernorm", HIDDEN), (x,), (tokens,), tokens)
    yield Case("root-mean-square norm", lambda f: f.norm("rmsnorm", HIDDEN), (x,), (tokens,), tokens)


def _attentions() -> Iterator[Case]:
    query, key, value = (_random(LENGTH, BATCH, count, SIZE) for count in (HEADS, KV_HEADS, KV_HEADS))
    lengths = torch.tensor([LENGTH, 5])  # of the two samples; later positions are padding
    padding = torch.arange(LENGTH) < lengths[:, None, None, None]  # [b, 1, 1, s]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    masks = {
        "attention core": None,
        "attention core that sees both ways": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool),
        "attention core with padded keys": padding,
        "attention core with padded keys, causal": padding & causal,  # [b, 1, s, s]
    }
    for name, mask in masks.items():
        yield Case(
            name,
            lambda f: f.core_attention(AttentionShape(HEADS, KV_HEADS, SIZE, 0), 0.0),
            (query, key, value, mask),
            (heads, heads, heads, whole),
            features(HEADS * SIZE),
            oracle=_PlainAttention(),
        )
    yield Case(
        "attention core without sharing of heads",
        lambda f: f.core_attention(AttentionShape(HEADS, HEADS, SIZE, 0), 0.0),
        (query, query.flip(2), query.flip(0), None),
        (heads, heads, heads, whole),
        features(HEADS * SIZE),
        oracle=_PlainAttention(),
    )


def _cross_entropies() -> Iterator[Case]:
    logits, labels = 4 * _random(LENGTH, BATCH, VOCAB), torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 37 % VOCAB

    def smoothed(layers: ParallelLayers) -> nn.Module:
        return layers.cross_entropy(VOCAB, 0.1)

    for name, make, smoothing, training in (
        ("cross entropy", lambda f: f.cross_entropy(VOCAB), 0.0, True),
        ("cross entropy with smoothed labels", smoothed, 0.1, True),
        ("cross entropy of an evaluation, which smoothes nothing", smoothed, 0.0, False),
    ):
        oracle = _PlainCrossEntropy(smoothing)
        yield Case(name, make, (logits, labels), (vocabulary, whole), whole, oracle=oracle, training=training)


class _Tied(nn.Module):
    """Tokens to logits through one matrix, whose gradient arrives twice."""

    def __init__(self, layers: ParallelLayers) -> None:
        super().__init__()
        self.word = layers.vocab_embedding(VOCAB, HIDDEN, init=INIT)
        self.output = layers.output_layer(VOCAB, HIDDEN, init=INIT, weight=next(self.word.parameters()))

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] -> [s, b, p/t]."""
        logits: Tensor = self.output(self.word(tokens))
        return logits


def _tied(layers: ParallelLayers) -> nn.Module:
    return _Tied(layers)


class _Experts(nn.Module):
    """Every token through one of this rank's three experts, of which one gets no tokens."""

    def __init__(self, layers: ParallelLayers, *, bias: bool) -> None:
        super().__init__()
        self._layers, parts = layers, (LinearPart("gate", 12), LinearPart("up", 12))
        self.input = layers.expert_column_linear(range(4, 7), HIDDEN, parts, bias=bias, init=INIT)
        self.output = layers.expert_row_linear(range(4, 7), 12, HIDDEN, bias=bias, init=INIT)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], both [s/t, b, h] under sequence parallelism."""
        rows, counts = self._layers.enter_region(x).flatten(0, 1), torch.tensor([5, 0, LENGTH * BATCH - 5])
        gate, up = self.input(rows, counts).chunk(2, dim=-1)
        return self._layers.leave_region(self.output(F.silu(gate) * up, counts).view(LENGTH, BATCH, HIDDEN))


class _PlainAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v, written out (Vaswani et al. 2017)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Query [s, b, n, d], key and value [s, b, k, d] -> [s, b, n*d]."""
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key) / math.sqrt(query.shape[-1])
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        probabilities = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("bnqk,kbnd->qbnd", probabilities, value).flatten(2)


class _PlainCrossEntropy(nn.Module):
    """PyTorch's cross entropy over the unpadded columns."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits [s, b, p], labels [b, s] -> [s, b]."""
        real = logits[..., :VOCAB].permute(1, 2, 0)  # [b, v, s]
        return F.cross_entropy(real, labels, reduction="none", label_smoothing=self.smoothing).t()


def _random(*shape: int) -> Tensor:
    """Normal values, equal in every process."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)
