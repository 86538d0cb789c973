"""The suite of kind parallel-layer sees what a wrong factory of layers does."""

from typing import Literal

import pytest
import torch
from torch import nn

from megatron_run.builtin.parallel_layer.dense import DenseLayers
from megatron_run.contracts import AttentionShape, Init, StackedLayers
from megatron_run.testing.parallel_layer import parallel_layer_checks
from tests.support.conformance import failures


class WrongEps(StackedLayers):
    def norm(self, kind: Literal["layernorm", "rmsnorm"], size: int, eps: float = 1e-5) -> nn.Module:
        return self.base.norm(kind, size, 1e-3)


class OtherNames(StackedLayers):
    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        return nn.Sequential(self.base.row_linear(inputs, outputs, bias=bias, init=init))


class OtherStart(StackedLayers):
    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        return self.base.row_linear(inputs, outputs, bias=bias, init=Init("normal", init.std / 2))


class SeesTheFuture(StackedLayers):
    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        core = self.base.core_attention(shape, dropout)
        everything = torch.ones(6, 6, dtype=torch.bool)
        core.forward = lambda q, k, v, mask: type(core).forward(core, q, k, v, everything if mask is None else mask)
        return core


class PaddingIsAClass(StackedLayers):
    def cross_entropy(self, vocab: int, label_smoothing: float = 0.0) -> nn.Module:
        return self.base.cross_entropy(-(-vocab // 128) * 128, label_smoothing)


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
    WrongEps: ("layer norm", "output"),
    OtherNames: ("row linear", "logical tensors"),
    OtherStart: ("row linear", "initial layer.weight"),
    SeesTheFuture: ("attention is causal without a mask", "mask"),
    PaddingIsAClass: ("padding is no class", "loss with padding"),
    KeepsItsWeight: ("an output layer shares the weight it is given", "does not hold"),
    DropsNothing: ("dropout drops and rescales", "dropped 0.0%"),
    WrongSign: ("vocabulary embedding", "output"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_suite_sees_a_wrong_layer(wrong: type[StackedLayers]) -> None:
    name, message = WRONG[wrong]
    checks = parallel_layer_checks(lambda context: wrong(DenseLayers(context)))
    assert message in failures(check for check in checks if check.name == name)[name]
