"""Every layer but attention with its inputs, the split of both over ranks, and its oracle.

The oracle of adapters is the dense layer with merged matrices, and from its gradients those of both factors. For
W' = W + scale * B A, the chain rule gives dB = scale * dW' A^T and dA = scale * B^T dW'; dW = dW'.

Legend: s sequence, b micro batch, h hidden, v vocabulary, p padded vocabulary, t tensor-parallel size. Here s = 8,
b = 2, h = 8, so that all but b divide by 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import Init, LinearPart, LinearSpec, ParallelLayers, ParamInfo, Part
from megatron_run_engine.runtime.parameter_init import initialise
from megatron_run_testing.parallel_layer.member import (
    HIDDEN,
    INIT,
    LENGTH,
    VOCAB,
    Cut,
    features,
    tokens,
    vocabulary,
    whole,
)

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Adapters

Make = Callable[[ParallelLayers], nn.Module]

BATCH = 2
#: An epsilon that no norm can leave out unnoticed: its inputs have squares of about 1.
_LARGE_EPS = 0.5
#: Chunks of the tokens of which a loss makes the logits at a time; they do not divide.
_CHUNKS = 3
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

    ``leaves`` selects the rank's part of the output, whose pieces are ``parts``. The expected output is that of the
    layer that ``oracle`` or, if it is None, ``make`` creates from the dense factory. ``training`` is the layer's mode;
    without ``learns`` there is no backward.

    An ability that factories may lack has ``lacks``, the reason why a layer does not have it, empty if it does; a
    factory may also refuse it by an :class:`InputError`.
    """

    name: str
    make: Make
    inputs: tuple[Tensor | None, ...]
    cuts: tuple[Cut, ...]
    leaves: Cut
    parts: tuple[LinearPart, ...] = ()
    oracle: Make | None = None
    training: bool = True
    learns: bool = True
    lacks: Callable[[nn.Module], str] | None = None


def cases() -> tuple[Case, ...]:
    """All cases; inputs are equal in every process."""
    return (*_linears(), *_experts(), *_ends(), *_norms(), *_cross_entropies())


def _linears() -> Iterator[Case]:
    x, cut = random_values(LENGTH, BATCH, HIDDEN), features(*(part.features for part in _QKV))
    whole = LinearSpec(HIDDEN, _QKV, INIT, bias=True)
    bare = replace(whole, bias=False)
    for name, make in {
        "column linear of three parts": lambda f: f.column_linear(whole),
        "column linear after a layer norm": lambda f: f.column_linear(whole, f.norm("layernorm", HIDDEN, _LARGE_EPS)),
        "column linear after a root-mean-square norm": lambda f: f.column_linear(
            bare, f.norm("rmsnorm", HIDDEN, _LARGE_EPS)
        ),
    }.items():
        yield Case(name, make, (x,), (tokens,), cut, _QKV)
    yield Case(
        "column linear after a root-mean-square norm times 1 + weight",
        lambda f: f.column_linear(bare, f.norm("rmsnorm_1p", HIDDEN, _LARGE_EPS)),
        (x,),
        (tokens,),
        cut,
        _QKV,
        lacks=lambda _: "",
    )
    one = (LinearPart("up", 12),)
    yield Case(
        "column linear without bias",
        lambda f: f.column_linear(LinearSpec(HIDDEN, one, INIT, bias=False)),
        (x,),
        (tokens,),
        features(12),
        one,
    )
    for name, make in {
        "row linear": lambda f: f.row_linear(LinearSpec(HIDDEN, 12, INIT, bias=True)),
        "row linear without bias": lambda f: f.row_linear(LinearSpec(HIDDEN, 12, INIT, bias=False)),
    }.items():
        yield Case(name, make, (x,), (features(HIDDEN),), tokens)


def _experts() -> Iterator[Case]:
    x = random_values(LENGTH, BATCH, HIDDEN)
    for name, bias in {"experts in a region": True, "experts without bias": False}.items():
        yield Case(name, partial(_Experts, bias=bias), (x,), (tokens,), tokens)


def _ends() -> Iterator[Case]:
    spread = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 19 % VOCAB  # some of every rank's rows
    yield Case(
        "vocabulary embedding", lambda f: f.vocab_embedding(VOCAB, HIDDEN, init=INIT), (spread,), (whole,), tokens
    )
    x = random_values(LENGTH, BATCH, HIDDEN)
    yield Case("output layer", lambda f: f.output_layer(VOCAB, HIDDEN, init=INIT), (x,), (tokens,), vocabulary)
    yield Case("output layer with the embedding's weight", _tied, (spread,), (whole,), vocabulary)


def _norms() -> Iterator[Case]:
    x = random_values(LENGTH, BATCH, HIDDEN)
    for name, make in {
        "layer norm": lambda f: f.norm("layernorm", HIDDEN),
        "layer norm with a large epsilon": lambda f: f.norm("layernorm", HIDDEN, _LARGE_EPS),
        "root-mean-square norm": lambda f: f.norm("rmsnorm", HIDDEN),
        "root-mean-square norm with a large epsilon": lambda f: f.norm("rmsnorm", HIDDEN, _LARGE_EPS),
    }.items():
        yield Case(name, make, (x,), (tokens,), tokens)
    for name, make in {
        "layer norm times 1 + weight": lambda f: f.norm("layernorm_1p", HIDDEN, _LARGE_EPS),
        "root-mean-square norm times 1 + weight": lambda f: f.norm("rmsnorm_1p", HIDDEN, _LARGE_EPS),
    }.items():
        yield Case(name, make, (x,), (tokens,), tokens, lacks=lambda _: "")


def _cross_entropies() -> Iterator[Case]:
    logits, labels = (
        4 * random_values(LENGTH, BATCH, VOCAB),
        torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 37 % VOCAB,
    )

    def smoothed(layers: ParallelLayers) -> nn.Module:
        return layers.cross_entropy(VOCAB, 0.1)

    for name, make, smoothing, training in (
        ("cross entropy", lambda f: f.cross_entropy(VOCAB), 0.0, True),
        ("cross entropy with smoothed labels", smoothed, 0.1, True),
        ("cross entropy of an evaluation, which smoothes nothing", smoothed, 0.0, False),
    ):
        oracle = _PlainCrossEntropy(smoothing)
        yield Case(name, make, (logits, labels), (vocabulary, whole), whole, oracle=always(oracle), training=training)
    x = random_values(LENGTH, BATCH, HIDDEN)
    for name, smoothing, training in (
        ("output layer and cross entropy in one", 0.1, True),
        ("output layer and cross entropy in one, of an evaluation", 0.0, False),
    ):
        yield Case(
            name,
            lambda f: _HeadLoss(f, f.linear_cross_entropy(VOCAB, 0.1, _CHUNKS)),
            (x, labels),
            (tokens, whole),
            whole,
            oracle=partial(_PlainHeadLoss, loss=_PlainCrossEntropy(smoothing)),
            training=training,
            lacks=lambda _: "",
        )


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


class _HeadLoss(nn.Module):
    """An output layer, whose weight ``loss`` multiplies with."""

    def __init__(self, layers: ParallelLayers, loss: nn.Module) -> None:
        super().__init__()
        self.output, self.loss = layers.output_layer(VOCAB, HIDDEN, init=INIT), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """[s, b, h] or [s/t, b, h], labels [b, s] -> [s, b]."""
        result: Tensor = self.loss(x, next(self.output.parameters()), labels)
        return result


class _PlainHeadLoss(_HeadLoss):
    """The same of whole logits."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """[s, b, h], labels [b, s] -> [s, b]."""
        result: Tensor = self.loss(self.output(x), labels)
        return result


class _Experts(nn.Module):
    """Every token through one of this rank's three experts, of which one gets no tokens."""

    def __init__(self, layers: ParallelLayers, *, bias: bool) -> None:
        super().__init__()
        self._layers, parts = layers, (LinearPart("gate", 12), LinearPart("up", 12))
        self.input = layers.expert_column_linear(range(4, 7), LinearSpec(HIDDEN, parts, INIT, bias=bias))
        self.output = layers.expert_row_linear(range(4, 7), LinearSpec(12, HIDDEN, INIT, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h], both [s/t, b, h] under sequence parallelism."""
        rows, counts = self._layers.enter_region(x).flatten(0, 1), torch.tensor([5, 0, LENGTH * BATCH - 5])
        gate, up = self.input(rows, counts).chunk(2, dim=-1)
        return self._layers.leave_region(self.output(F.silu(gate) * up, counts).view(LENGTH, BATCH, HIDDEN))


class _PlainCrossEntropy(nn.Module):
    """PyTorch's cross entropy over the unpadded columns."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits [s, b, p], labels [b, s] -> [s, b]."""
        real = logits[..., :VOCAB].permute(1, 2, 0)  # [b, v, s]
        return F.cross_entropy(real, labels, reduction="none", label_smoothing=self.smoothing).t()


def always(oracle: nn.Module) -> Make:
    """Creates ``oracle``, from whatever factory."""
    return lambda _: oracle


def random_values(*shape: int) -> Tensor:
    """Normal values, equal in every process."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)
