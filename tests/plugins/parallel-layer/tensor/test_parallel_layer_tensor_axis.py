"""The same layers, shared by the ranks of another axis than parallel.tensor's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_run.contracts import Init, LinearPart, LinearSpec, ParallelLayers
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.errors import InputError
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.nn.parallel import LayerSplit
from megatron_run_engine.runtime.comm import ParallelGroup, create_groups
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_parallel_layer_tensor import TensorLayers
from megatron_run_testing.build_contexts import context_at, prepare, single_process_context
from tests.support.ranks import run_ranks


class FeedForward(nn.Module):
    """Norm, up, down: [s, b, 8] -> [s, b, 8]."""

    def __init__(self, layers: ParallelLayers) -> None:
        super().__init__()
        init = Init("normal", 0.5)
        norm = layers.norm("layernorm", 8)
        self.up = layers.column_linear(LinearSpec(8, (LinearPart("up", 12),), init, bias=True), norm)
        self.down = layers.row_linear(LinearSpec(12, 8, init, bias=True))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


def trained(layers: ParallelLayers, context: BuildContext, x: Tensor, weights: Tensor) -> dict[str, Any]:
    """The output, and the gradients of x and of every parameter that is whole on this rank."""
    layer = FeedForward(layers)
    infos = prepare(context, [layer])  # type: ignore[list-item]  # parameters are all that is looked at
    (y := layer(x.requires_grad_())).backward(weights)
    assert x.grad is not None
    norms = {}
    for parameter, info in infos.items():
        if "norm" in info.name or info.name == "down.bias":
            gradient = main_grad(parameter)
            norms[info.name] = context.groups.sum_(gradient, info.partial_over) if info.partial_over else gradient
    found = {"output": y, "input": x.grad, **norms}
    return {name: tensor.tolist() for name, tensor in found.items()}


def example() -> tuple[Tensor, Tensor]:
    """Input and weights of the output, [s, b, 8]."""
    x, weights = torch.randn((2, 4, 2, 8), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return x, weights


def share_over_data(rank: int, world: int) -> list[dict[str, Any]]:
    topology = Topology(Sizes(data=world), rank)
    groups, found = create_groups(topology, timedelta(seconds=20)), []
    for sequence in (False, True):
        context = context_at(topology, groups)
        layers = TensorLayers(
            context, LayerSplit(groups.parallel_group(topology, "replicas"), sequence, axis="replicas")
        )
        mine = [tensor.chunk(world)[rank] if sequence else tensor for tensor in example()]
        found.append(trained(layers, context, *(tensor.clone() for tensor in mine)))
    return found


@pytest.mark.multiproc
def test_layers_that_data_ranks_share_compute_what_one_rank_does() -> None:
    context = single_process_context()
    expected = trained(DenseLayers(context), context, *example())
    for rank, found in enumerate(run_ranks(share_over_data, 2)):
        for sequence, shared in zip((False, True), found, strict=True):
            assert shared.keys() == expected.keys()
            for name, value in expected.items():
                split = sequence and name in ("output", "input")
                part = torch.tensor(value, dtype=torch.float64).chunk(2)[rank] if split else value
                torch.testing.assert_close(shared[name], torch.as_tensor(part).tolist(), msg=f"{name}, {sequence=}")


def test_what_does_not_divide_names_the_axis() -> None:
    with pytest.raises(InputError) as caught:
        LayerSplit(ParallelGroup(0, 4), axis="context").part(18, "tokens")
    assert str(caught.value) == (
        "18 tokens do not split over 4 context-parallel ranks: 18 / 4 = 4.5; "
        "set parallel.context to 3 or 6, or choose 16 or 20 tokens"
    )
