"""The suite of parallel layers checks attention of samples that context-parallel ranks split."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_run.contracts import AttentionCore, AttentionShape, Microbatch, ParallelLayers, StackedLayers
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_parallel_layer_context import ContextLayers, Options
from megatron_run_testing.parallel_layer.pieces import piece_checks
from tests.contracts.conformance import failures

pytestmark = pytest.mark.multiproc


def layers(context: BuildContext, method: Any = "ring") -> ParallelLayers:
    return ContextLayers(context, DenseLayers(context), Options(method=method))


class Changed(StackedLayers):
    """The plugin's layers, each core of which ``change`` has changed."""

    def __init__(self, base: ParallelLayers, change: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__(base)
        self._change = change

    def core_attention(self, shape: AttentionShape, dropout: float) -> nn.Module:
        return self._change(self.base.core_attention(shape, dropout))


class Around(nn.Module, AttentionCore):
    """A core that claims what ``base`` does."""

    pieces, packs = True, True

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.variants = base, AttentionCore.of(base).variants

    def forward(self, *inputs: Any) -> Tensor:
        found: Tensor = self.base(*inputs)
        return found


def sees_its_own_tokens(context: BuildContext) -> ParallelLayers:
    return Changed(DenseLayers(context), Around)


def claims_nothing(context: BuildContext) -> ParallelLayers:
    class Silent(Around):
        pieces = False

    return Changed(layers(context), Silent)


def packs_nothing(context: BuildContext) -> ParallelLayers:
    class Unpacked(Around):
        packs = False

    return Changed(layers(context), Unpacked)


def ignores_documents(context: BuildContext) -> ParallelLayers:
    class Crossing(Around):
        def forward(self, *inputs: Any) -> Tensor:
            return super().forward(*inputs[:4])

    return Changed(layers(context), Crossing)


def loses_gradients_of_keys(context: BuildContext) -> ParallelLayers:
    class Stopped(Around):
        def forward(self, query: Tensor, key: Tensor, *rest: Any) -> Tensor:
            return super().forward(query, key.detach() + 0 * key, *rest)

    return Changed(layers(context), Stopped)


def drops_alike(context: BuildContext) -> ParallelLayers:
    class Alike(Around):
        def forward(self, *inputs: Any) -> Tensor:
            torch.manual_seed(torch.initial_seed() % 2)
            return super().forward(*inputs)

    made = Changed(layers(context), Alike)
    position = context.rng.position

    def everywhere(microbatch: Microbatch, layer: int, segment: int) -> None:
        position(microbatch, layer, segment)
        torch.manual_seed(2 * layer + segment)

    setattr(context.rng, "position", everywhere)  # noqa: B010  # a method is no attribute to mypy
    return made


WRONG: dict[Callable[[BuildContext], ParallelLayers], tuple[str, str]] = {
    sees_its_own_tokens: ("attention core of pieces", "output on context rank 0 of 2: "),
    claims_nothing: ("attention core of pieces", "its attention does not claim pieces"),
    ignores_documents: ("attention core of pieces that packs documents", "output on context rank 0 of 2: "),
    loses_gradients_of_keys: ("attention core of pieces", "gradient of input 1 on context rank 0 of 2: "),
    drops_alike: ("attention dropout differs between pieces", "drops the same values on context ranks 0 and 1"),
}


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_right_layers_pass(method: str) -> None:
    checks = piece_checks(partial(layers, method=method), (2,), torch.float64, 1e-10)
    assert {check.run() for check in checks} == {""}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_suite_sees_wrong_pieces(wrong: Callable[[BuildContext], ParallelLayers]) -> None:
    name, message = WRONG[wrong]
    found = failures(check for check in piece_checks(wrong, (2,), torch.float64, 1e-10) if check.name == name)
    assert message in found[name]


def test_what_is_not_claimed_is_not_asked() -> None:
    checks = piece_checks(packs_nothing, (2,), torch.float64, 1e-10)
    (check,) = (check for check in checks if check.name == "attention core of pieces that packs documents")
    assert check.run() == "its attention does not claim packs"


def test_without_context_parallel_ranks_there_is_nothing_to_check() -> None:
    assert piece_checks(layers, (), torch.float64, 1e-10) == ()
