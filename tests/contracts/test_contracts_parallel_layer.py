"""The suite of kind parallel-layer sees what a wrong factory of layers does, on one rank and on several."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import (
    AttentionCore,
    AttentionShape,
    Init,
    LinearSpec,
    NormKind,
    ParallelLayers,
    StackedLayers,
)
from megatron_run.errors import InputError
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_testing import parallel_layer
from megatron_run_testing.parallel_layer import parallel_layer_checks
from tests.contracts.conformance import failures
from tests.support.tensor_layers import tensor_layers

pytestmark = pytest.mark.usefixtures("fork_server")


class WrongEps(StackedLayers):
    def norm(self, kind: NormKind, size: int, eps: float = 1e-5) -> nn.Module:
        return self.base.norm(kind, size, 1e-3)


class NoEps(StackedLayers):
    def norm(self, kind: NormKind, size: int, eps: float = 1e-5) -> nn.Module:
        return self.base.norm(kind, size)


class PlainNorms(StackedLayers):
    """Knows one form of each norm, and gives it for the other as well."""

    def norm(self, kind: NormKind, size: int, eps: float = 1e-5) -> nn.Module:
        return self.base.norm("layernorm" if kind.startswith("layernorm") else "rmsnorm", size, eps)


class OtherNames(StackedLayers):
    def row_linear(self, spec: LinearSpec) -> nn.Module:
        return nn.Sequential(self.base.row_linear(spec))


class OtherStart(StackedLayers):
    def row_linear(self, spec: LinearSpec) -> nn.Module:
        return self.base.row_linear(replace(spec, init=Init("normal", spec.init.std / 2)))


class OtherDecay(StackedLayers):
    def row_linear(self, spec: LinearSpec) -> nn.Module:
        layer: Any = self.base.row_linear(spec)
        layer.parameter_specs["weight"] = replace(layer.parameter_specs["weight"], decay=False)
        made: nn.Module = layer
        return made


class SeesTheFuture(StackedLayers):
    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        core = self.base.core_attention(shape, dropout)
        forward = core.forward
        core.forward = lambda q, k, v, mask: forward(
            q, k, v, torch.ones(len(q), len(q), dtype=torch.bool) if mask is None else mask
        )
        return core


class IgnoresTheMask(StackedLayers):
    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        core = self.base.core_attention(shape, dropout)
        forward = core.forward
        core.forward = lambda q, k, v, _: forward(q, k, v, None)
        return core


class PlainAttention(nn.Module):
    """Attention in one call, which claims nothing."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, documents: Tensor | None = None
    ) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        dropout, causal = self.dropout * self.training, mask is None
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, enable_gqa=True)
        return y.permute(2, 0, 1, 3).flatten(2)


class ClaimsAll(PlainAttention, AttentionCore):
    """Claims variants, documents and caches, and ignores them: its causal mask aligns the first key and query."""

    variants, packs, caches = frozenset({"scale", "window", "softcap"}), True, True


class Claims(StackedLayers):
    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        return ClaimsAll(dropout)


class ClaimsNothing(StackedLayers):
    """Has none of what a factory may lack."""

    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        return PlainAttention(dropout)

    def norm(self, kind: NormKind, size: int, eps: float = 1e-5) -> nn.Module:
        if kind.endswith("_1p"):
            raise InputError(f"no {kind} here", fix="choose another")
        return self.base.norm(kind, size, eps)

    def linear_cross_entropy(self, vocab: int, label_smoothing: float, chunks: int) -> nn.Module:
        return ParallelLayers.linear_cross_entropy(self, vocab, label_smoothing, chunks)


class ForgetsToSmooth(StackedLayers):
    def linear_cross_entropy(self, vocab: int, label_smoothing: float, chunks: int) -> nn.Module:
        return self.base.linear_cross_entropy(vocab, 0.0, chunks)


class KeepsTheHead(StackedLayers):
    """Its loss in chunks has no gradient of the output layer's weight."""

    def linear_cross_entropy(self, vocab: int, label_smoothing: float, chunks: int) -> nn.Module:
        loss = self.base.cross_entropy(vocab, label_smoothing)
        forward = loss.forward
        loss.forward = lambda x, weight, labels: forward(F.linear(x, weight.detach()), labels)
        return loss


class PaddingIsAClass(StackedLayers):
    def cross_entropy(self, vocab: int, label_smoothing: float = 0.0) -> nn.Module:
        return self.base.cross_entropy(-(-vocab // 128) * 128, label_smoothing)


class SmoothsEvaluations(StackedLayers):
    def cross_entropy(self, vocab: int, label_smoothing: float = 0.0) -> nn.Module:
        loss = self.base.cross_entropy(vocab, label_smoothing)
        setattr(loss, "train", lambda mode=True: loss)  # noqa: B010  # a method is no attribute to mypy
        return loss


class KeepsItsWeight(StackedLayers):
    def output_layer(self, vocab: int, hidden: int, *, init: Init, weight: nn.Parameter | None = None) -> nn.Module:
        return self.base.output_layer(vocab, hidden, init=init)


class DropsNothing(StackedLayers):
    def dropout(self, p: float) -> nn.Module:
        return nn.Identity()


class WrongSign(StackedLayers):
    def vocab_embedding(self, vocab: int, hidden: int, *, init: Init) -> nn.Module:
        layer = self.base.vocab_embedding(vocab, hidden, init=init)
        forward = layer.forward
        layer.forward = lambda tokens: -forward(tokens)
        return layer


WRONG = {
    WrongEps: ("layer norm", "output on one rank"),
    PlainNorms: ("root-mean-square norm times 1 + weight", "output on one rank"),
    ForgetsToSmooth: ("output layer and cross entropy in one", "output"),
    KeepsTheHead: ("output layer and cross entropy in one", "gradient of layer.output.weight"),
    OtherNames: ("row linear", "logical tensors on one rank"),
    OtherStart: ("row linear", "initial layer.weight on one rank"),
    OtherDecay: ("row linear", "layer.weight on one rank: shape (12, 8), decay False, expected (12, 8), True"),
    SeesTheFuture: ("attention is causal without a mask", "mask"),
    IgnoresTheMask: ("attention core with padded keys", "output"),
    PaddingIsAClass: ("padding is not a class", "loss with padding"),
    SmoothsEvaluations: ("cross entropy of an evaluation, which smoothes nothing", "output"),
    KeepsItsWeight: ("an output layer shares the weight it is given", "does not hold"),
    DropsNothing: ("dropout drops and rescales", "drops the same values in another segment"),
    WrongSign: ("vocabulary embedding", "output"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_suite_sees_a_wrong_layer(wrong: type[StackedLayers]) -> None:
    name, message = WRONG[wrong]
    checks = parallel_layer_checks(lambda context: wrong(DenseLayers(context)))
    assert message in failures(check for check in checks if check.name == name)[name]


@pytest.mark.parametrize("kind", ["layer norm", "root-mean-square norm"])
def test_the_suite_sees_an_epsilon_that_is_ignored(kind: str) -> None:
    found = failures(parallel_layer_checks(lambda context: NoEps(DenseLayers(context))))
    assert f"{kind} with a large epsilon" in found
    assert kind not in found


CLAIMED = {
    "attention core with a scale of its own",
    "attention core with a window",
    "attention core with capped scores",
    "attention core with padded keys and all variants",
    "attention core that packs documents",
    "attention core that packs documents with a window",
    "attention core of tokens after cached ones",
    "attention core with a window of tokens after cached ones",
}


def test_the_suite_sees_what_attention_claims_and_ignores() -> None:
    found = failures(parallel_layer_checks(lambda context: Claims(DenseLayers(context))))
    assert found.keys() >= CLAIMED
    assert "attention core" not in found


def test_nothing_is_asked_that_is_not_claimed() -> None:
    checks = parallel_layer_checks(lambda context: ClaimsNothing(DenseLayers(context)))
    told = {check.name: check.run() or "" for check in checks}
    assert (
        told["attention core with scale, window and cap"] == "its attention does not claim scale and softcap and window"
    )
    assert told["attention core that packs documents"] == "its attention does not claim packs"
    assert told["attention core of a token after cached ones"] == "its attention does not claim caches"
    assert told["layer norm times 1 + weight"] == "it refuses: no layernorm_1p here"
    assert "model.loss_chunks=3" in told["output layer and cross entropy in one"]
    assert told["attention core"] == ""
    assert {check.run() or "" for check in parallel_layer_checks(DenseLayers)} == {""}


def _changed(context: BuildContext, method: str, change: Callable[[Any], None]) -> ParallelLayers:
    """The tensor plugin's factory, whose ``method`` makes layers that ``change`` has changed."""
    layers = tensor_layers(context)
    make = getattr(layers, method)

    def made(*arguments: Any, **keywords: Any) -> nn.Module:
        layer: nn.Module = make(*arguments, **keywords)
        change(layer)
        return layer

    setattr(layers, method, made)
    return layers


def forgets_the_sum_in_the_backward(context: BuildContext) -> ParallelLayers:
    def change(layer: Any) -> None:
        layer.forward = lambda x: F.linear(x, layer.weight, layer.bias)

    return _changed(context, "column_linear", change)


def adds_the_bias_on_every_rank(context: BuildContext) -> ParallelLayers:
    def change(layer: Any) -> None:
        forward = layer.forward
        layer.forward = lambda x: forward(x) + (context.topology.sizes.tensor - 1) * layer.bias

    return _changed(context, "row_linear", change)


def holds_the_parts_of_another_rank(context: BuildContext) -> ParallelLayers:
    def change(layer: Any) -> None:
        specs = layer.parameter_specs
        moved = [replace(part, start=len(part.local) - part.start) for part in specs["weight"].parts]
        specs["weight"] = replace(specs["weight"], parts=tuple(moved))

    return _changed(context, "column_linear", change)


def holds_everything_twice(context: BuildContext) -> ParallelLayers:
    return DenseLayers(context)


def forgets_that_norms_see_few_tokens(context: BuildContext) -> ParallelLayers:
    def change(layer: Any) -> None:
        layer.parameter_specs = {name: replace(spec, partial_over=None) for name, spec in layer.parameter_specs.items()}

    return _changed(context, "norm", change)


def sums_what_is_no_part_of_a_sum(context: BuildContext) -> ParallelLayers:
    def change(layer: Any) -> None:
        specs = layer.parameter_specs
        specs["weight"] = replace(specs["weight"], partial_over="tensor")

    return _changed(context, "column_linear", change)


def drops_alike_inside(context: BuildContext) -> ParallelLayers:
    def change(core: Any) -> None:
        forward = core.forward

        def alike(*arguments: Tensor) -> Any:
            torch.default_generator.set_state(context.rng.replicated.get_state())
            return forward(*arguments)

        core.forward = alike

    return _changed(context, "core_attention", change)


def drops_differently_outside(context: BuildContext) -> ParallelLayers:
    layers = tensor_layers(context)
    setattr(layers, "dropout", nn.Dropout)  # noqa: B010  # a method is no attribute to mypy
    return layers


def raises_on_the_second_rank(context: BuildContext) -> ParallelLayers:
    def change(layer: nn.Module) -> None:
        if context.topology.rank == 1:
            raise ValueError("no rows here")

    return _changed(context, "row_linear", change)


def dies_on_the_second_rank(context: BuildContext) -> ParallelLayers:
    def change(layer: nn.Module) -> None:
        if context.topology.rank == 1:
            os._exit(7)

    return _changed(context, "row_linear", change)


SPLIT_WRONG: dict[Callable[[BuildContext], ParallelLayers], tuple[str, str]] = {
    forgets_the_sum_in_the_backward: ("column linear of three parts", "gradient of input 0 on rank 0 of 2: "),
    adds_the_bias_on_every_rank: ("row linear", "output on rank 0 of 2: "),
    holds_the_parts_of_another_rank: ("column linear of three parts", "output of query on rank 0 of 2: "),
    holds_everything_twice: ("column linear of three parts", "output is [8, 2, 32], expected [8, 2, 16]"),
    forgets_that_norms_see_few_tokens: ("layer norm", "gradient of layer.bias on rank 0 of 2, sequence split: "),
    sums_what_is_no_part_of_a_sum: (
        "column linear without bias",
        "layer.up.weight declares a gradient that is partial over tensor, but rank 1 of 2 holds another piece",
    ),
    drops_alike_inside: (
        "attention dropout differs between ranks",
        "attention with dropout drops the same values on rank 0 of 2 and rank 1 of 2, expected different ones",
    ),
    drops_differently_outside: (
        "dropout drops and rescales",
        "dropout drops different values on rank 0 of 2 and rank 1 of 2, expected the same ones",
    ),
    raises_on_the_second_rank: ("row linear", "on 2 ranks: rank 1: ValueError: no rows here (test_contracts_parallel_"),
    dies_on_the_second_rank: ("row linear", "on 2 ranks: rank 1: the process ended without a word"),
}


def only(names: Collection[str], patch: pytest.MonkeyPatch) -> None:
    """Let the ranks of a suite try the trials ``names`` alone: they would go on with all that come later."""
    every = parallel_layer.all_trials
    kept = lambda *where: {name: trial for name, trial in every(*where).items() if name in names}  # noqa: E731
    patch.setattr(parallel_layer, "all_trials", kept)


@pytest.mark.multiproc
@pytest.mark.parametrize("wrong", SPLIT_WRONG, ids=lambda wrong: wrong.__name__)
def test_the_suite_sees_a_wrong_split(
    wrong: Callable[[BuildContext], ParallelLayers], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, message = SPLIT_WRONG[wrong]
    only([name], monkeypatch)
    checks = parallel_layer_checks(wrong, ranks=(2,), sequence="sequence" in message)
    found = failures(check for check in checks if check.name == name)[name]
    assert found.startswith(f"{name}: ")
    assert message in found


@pytest.mark.multiproc
def test_what_comes_after_a_failure_is_tried_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, others = ["row linear", "row linear without bias"], ["column linear without bias", "layer norm"]
    only([*wrong, *others], monkeypatch)
    checks = parallel_layer_checks(raises_on_the_second_rank, ranks=(2,), sequence=False)
    assert [check.name for check in checks][1:3] == wrong, "some come before and some after"
    assert list(failures(checks)) == wrong


def test_a_factory_that_no_other_process_can_name_is_refused() -> None:
    def create(context: BuildContext) -> ParallelLayers:
        return DenseLayers(context)

    (first, *_) = parallel_layer_checks(create, ranks=(2,))
    (found,) = failures([first]).values()
    assert "cannot be sent to another rank" in found
    assert found.endswith("give a module's function, or PluginLayers")
