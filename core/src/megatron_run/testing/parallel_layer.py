"""The conformance suite of kind ``parallel-layer``: every layer against the dense one, on one process.

Legend: s sequence, b micro batch, h hidden, n heads, d head size, p padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from megatron_run.builtin.parallel_layer.dense import DenseLayers
from megatron_run.contracts import (
    AttentionShape,
    BuildContext,
    ChunkOut,
    Init,
    LinearPart,
    Microbatch,
    ParallelLayers,
    Segment,
)
from megatron_run.testing.check import Check, CheckFailed
from megatron_run.testing.context import logical_gradients, logical_values, prepare, single_process_context

#: Makes the factory under test; what it is stacked on, if it needs a base, is ``DenseLayers(context)``.
CreateLayers = Callable[[BuildContext], ParallelLayers]
_Make = Callable[[ParallelLayers], nn.Module]

_INIT = Init("normal", 0.5)
_VOCAB = 61  # a prime, so that it is padded whatever the multiple


def parallel_layer_checks(
    create: CreateLayers, *, dtype: torch.dtype = torch.float64, device: str = "cpu", tolerance: float = 1e-10
) -> tuple[Check, ...]:
    """The checks that every factory of layers must pass at tensor-parallel size 1.

    Outputs, input gradients and weight gradients are those of the dense layers within ``tolerance``, relative and
    absolute; choose a looser one with a ``dtype`` below float64.
    """
    bench = _Bench(create, dtype, torch.device(device), tolerance)
    layers: dict[str, Callable[[], None]] = {
        name: partial(bench.compare, name, make, inputs) for name, (make, inputs) in _cases(bench).items()
    }
    rules: dict[str, Callable[[], None]] = {
        "weight gradients may be deferred": bench.deferred,
        "an output layer shares the weight it is given": bench.shares_weight,
        "padding is no class": bench.padding_is_no_class,
        "dropout drops and rescales": bench.dropout,
        "attention is causal without a mask": bench.causal,
    }
    return tuple(Check(name, run) for name, run in {**layers, **rules}.items())


class _Options(BaseModel):
    """A model that only has a size."""

    num_layers: int = 1
    vocab_size: int = _VOCAB


class _OneLayer(nn.Module):
    """A chunk that gives one layer a name in the tree."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        """Run the layer."""
        return ChunkOut(self.layer(x))

    def segments(self) -> tuple[Segment, ...]:
        """None: the layer is called directly."""
        return ()


@dataclass
class _Outcome:
    """What one factory's layer did: everything that is compared."""

    output: Tensor
    input_gradients: list[Tensor]
    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass
class _Bench:
    create: CreateLayers
    dtype: torch.dtype
    device: torch.device
    tolerance: float
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    def random(self, *shape: int) -> Tensor:
        """Normal values, equal in every run."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.device, self.dtype)

    def tokens(self, batch: int, length: int) -> Tensor:
        """Token ids [batch, length]."""
        return torch.randint(_VOCAB, (batch, length), generator=self.generator).to(self.device)

    def context(self) -> BuildContext:
        """A fresh context: its ledger has seen no gradient."""
        return single_process_context(_Options(), dtype=self.dtype, device=self.device)

    def compare(self, name: str, make: _Make, inputs: tuple[Tensor, ...]) -> None:
        """Run the layer and the dense one on equal values, and compare all that comes out."""
        found, expected = self._run(self.create, make, inputs), self._run(DenseLayers, make, inputs)
        if found.values.keys() != expected.values.keys():
            raise CheckFailed(f"{name}: logical tensors {sorted(found.values)}, expected {sorted(expected.values)}")
        for part, value in expected.values.items():
            self._equal(f"{name}: initial {part}", found.values[part], value)
        self._equal(f"{name}: output", found.output, expected.output)
        for index, gradient in enumerate(expected.input_gradients):
            self._equal(f"{name}: gradient of input {index}", found.input_gradients[index], gradient)
        for part, gradient in expected.gradients.items():
            self._equal(f"{name}: gradient of {part}", found.gradients[part], gradient)

    def deferred(self) -> None:
        """A gradient that waits for action W is the one that is computed at once."""
        context, key = self.context(), (0, 0)
        make, (x,) = _cases(self)["column linear of three parts"]
        layer = make(self.create(context))
        infos = prepare(context, [_OneLayer(layer)])
        layer(x).sum().backward()
        once = logical_gradients(infos)
        with context.gradients.deferring(key):
            layer(x).sum().backward()
        context.gradients.run_deferred(key)
        for name, gradient in logical_gradients(infos).items():
            self._equal(f"after a whole and a split backward, gradient of {name}", gradient, 2 * once[name])

    def shares_weight(self) -> None:
        """A tied output layer has no weight of its own."""
        layers = self.create(self.context())
        word = layers.vocab_embedding(_VOCAB, 8, init=_INIT)
        shared = next(word.parameters())
        output = layers.output_layer(_VOCAB, 8, init=_INIT, weight=shared)
        if [id(parameter) for parameter in output.parameters()] != [id(shared)]:
            raise CheckFailed("output_layer(weight=w) does not hold w alone")

    def padding_is_no_class(self) -> None:
        """Whatever the padding columns hold, the loss is the same, and no gradient flows into them."""
        layers = self.create(self.context())
        width = len(next(layers.vocab_embedding(_VOCAB, 8, init=_INIT).parameters()))
        logits, labels = self.random(6, 2, width), self.tokens(2, 6)
        loss = layers.cross_entropy(_VOCAB)
        real = torch.nn.functional.cross_entropy(
            logits[..., :_VOCAB].permute(1, 2, 0).double(), labels, reduction="none"
        )  # [b, s]
        logits.requires_grad_()
        found = loss(logits, labels)
        self._equal("loss with padding", found, real.t().to(found.dtype))
        found.sum().backward()
        assert logits.grad is not None
        if logits.grad[..., _VOCAB:].any():
            raise CheckFailed("a gradient flows into the padding columns of the logits")

    def dropout(self) -> None:
        """Nothing in evaluation; in training zeros, and the rest grown by 1 / (1 - p)."""
        dropout = self.create(self.context()).dropout(0.25)
        x = torch.ones(64, 4, 64, dtype=self.dtype, device=self.device)
        self._equal("dropout in evaluation", dropout.eval()(x), x)
        y = dropout.train()(x)
        dropped = (y == 0).double().mean().item()
        if not 0.2 < dropped < 0.3:
            raise CheckFailed(f"dropout with p = 0.25 dropped {dropped:.1%}")
        self._equal("what dropout kept", y[y != 0], torch.full_like(y[y != 0], 1 / 0.75))

    def causal(self) -> None:
        """Later positions do not reach earlier ones, and a causal mask says the same as no mask."""
        attention = self.create(self.context()).core_attention(AttentionShape(4, 2, 8, 0), 0.0)
        query, key, value = self.random(6, 2, 4, 8), self.random(6, 2, 2, 8), self.random(6, 2, 2, 8)
        before = attention(query, key, value, None)
        mask = torch.ones(6, 6, dtype=torch.bool, device=self.device).tril()
        self._equal("attention with a causal mask", attention(query, key, value, mask), before)
        key[4:], value[4:] = 9.0, -9.0
        self._equal("attention before a change", attention(query, key, value, None)[:4], before[:4])

    def _run(self, create: CreateLayers, make: _Make, inputs: tuple[Tensor, ...]) -> _Outcome:
        context = self.context()
        layer = make(create(context))
        infos = prepare(context, [_OneLayer(layer)])
        given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        output = layer(*given)
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=self.device)
        output.backward(weights.view_as(output))
        gradients = [x.grad for x in given if x.grad is not None]
        return _Outcome(output, gradients, logical_values(infos), logical_gradients(infos))

    def _equal(self, name: str, found: Tensor, expected: Tensor) -> None:
        try:
            torch.testing.assert_close(found, expected, rtol=self.tolerance, atol=self.tolerance)
        except AssertionError as difference:
            raise CheckFailed(f"{name}: {str(difference).splitlines()[0]}") from difference


def _cases(bench: _Bench) -> dict[str, tuple[_Make, tuple[Tensor, ...]]]:
    """Every layer with its inputs: s = 6, b = 2, h = 8, n = 4, k = 2, d = 8."""
    x = bench.random(6, 2, 8)
    qkv = (LinearPart("query", 8), LinearPart("key", 4), LinearPart("value", 4))
    query, key, value = bench.random(6, 2, 4, 8), bench.random(6, 2, 2, 8), bench.random(6, 2, 2, 8)
    shape, tokens = AttentionShape(4, 2, 8, 0), bench.tokens(2, 6)
    logits = bench.random(6, 2, 128)
    return {
        "column linear of three parts": (lambda f: f.column_linear(8, qkv, bias=True, init=_INIT), (x,)),
        "column linear without bias": (lambda f: f.column_linear(8, qkv[:1], bias=False, init=_INIT), (x,)),
        "row linear": (lambda f: f.row_linear(8, 12, bias=True, init=_INIT), (x,)),
        "vocabulary embedding": (lambda f: f.vocab_embedding(_VOCAB, 8, init=_INIT), (tokens,)),
        "output layer": (lambda f: f.output_layer(_VOCAB, 8, init=_INIT), (x,)),
        "layer norm": (lambda f: f.norm("layernorm", 8), (x,)),
        "root-mean-square norm": (lambda f: f.norm("rmsnorm", 8), (x,)),
        "attention core": (lambda f: f.core_attention(shape, 0.0), (query, key, value)),
        "cross entropy": (lambda f: f.cross_entropy(_VOCAB), (logits, tokens)),
    }
