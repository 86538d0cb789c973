"""The pieces of split layers, on one rank of several that are not there."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_run.contracts import Init, Microbatch
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.nn.parallel import LayerSplit, ReplicatedDropout, VocabEmbedding, column_linear
from megatron_run_engine.nn.parallel.mappings import f
from megatron_run_engine.nn.parameter import owned
from megatron_run_engine.runtime.comm import Groups, ParallelGroup, Pending
from megatron_run_engine.runtime.gradients import GradientAccumulator, main_grad
from megatron_run_engine.runtime.rng import RandomStreams
from megatron_run_parallel_layer_tensor import TensorLayers
from megatron_run_testing.build_contexts import context_at, single_process_context
from tests.support.late import late


@dataclass(frozen=True)
class Twins(ParallelGroup):
    """Two ranks of which the other always holds what this one does; ``calls`` are what they did together.

    What they make of it is there once it is waited for, and not before.
    """

    size: int = 2
    calls: list[str] = field(default_factory=list)

    def start_sum(self, tensor: Tensor) -> Pending:
        self.calls.append("sum")
        return late(tensor, 2 * tensor)

    def start_gather(self, part: Tensor) -> Pending:
        self.calls.append("gather")
        return _late(torch.cat([part, part]))

    def start_scatter_sum(self, whole: Tensor) -> Pending:
        self.calls.append("scatter")
        return _late(2 * whole.chunk(2)[0])


def _late(values: Tensor) -> Pending:
    return late(torch.empty_like(values), values)


def parameter(*shape: int) -> Parameter:
    made = Parameter(torch.randn(shape, dtype=torch.float64))
    made.main_grad = torch.zeros(shape, dtype=torch.float64)  # type: ignore[attr-defined]  # the engine's attribute
    return made


@pytest.mark.parametrize(("sequence", "gather", "scatter"), [(False, [], ["sum"]), (True, ["gather"], ["scatter"])])
def test_a_backward_computes_and_communicates_only_what_is_asked_for(
    sequence: bool, gather: list[str], scatter: list[str]
) -> None:
    asked = {"both": (True, True), "the input's": (True, False), "the weight's": (False, True)}
    calls, inputs, weights = {}, {}, {}
    first, values = torch.randn(4, 2, 3, dtype=torch.float64), parameter(5, 3)
    for name, (of_input, of_weight) in asked.items():
        peers, weight = Twins(), parameter(5, 3)
        weight.data.copy_(values.data)
        x = first.clone().requires_grad_(of_input)
        y = column_linear(x, weight.requires_grad_(of_weight), None, GradientAccumulator(), LayerSplit(peers, sequence))  # type: ignore[arg-type]  # a Parameter still
        peers.calls.clear()
        y.backward(torch.ones_like(y))
        calls[name], inputs[name], weights[name] = peers.calls, x.grad, main_grad(weight)
    assert calls == {"both": gather + scatter, "the input's": scatter, "the weight's": gather}
    torch.testing.assert_close(inputs["the input's"], inputs["both"])
    torch.testing.assert_close(weights["the weight's"], weights["both"])
    assert inputs["the weight's"] is None
    assert not weights["the input's"].any()


def test_a_gradient_that_somebody_else_may_read_is_summed_in_a_copy() -> None:
    x, gradient = torch.ones(3, requires_grad=True), torch.ones(3)
    (found,) = torch.autograd.grad(f(x, Twins()), x, gradient)
    assert (found.tolist(), gradient.tolist()) == ([2.0] * 3, [1.0] * 3)


def test_ids_of_other_ranks_spread_over_all_rows_of_this_one() -> None:
    """A gradient of zeros is added there: if it all met in one row, a device would add it one after the other."""
    ids = torch.arange(24).view(4, 6)
    row, mine = owned(ids, 8, 8, 24)
    assert torch.equal(ids[mine], torch.arange(8, 16))
    assert torch.equal(row[mine], torch.arange(8))
    assert torch.bincount(row[~mine]).tolist() == [2] * 8


@pytest.mark.parametrize("token", [-1, 384, 1000])
def test_a_token_that_no_rank_holds_is_refused(token: int) -> None:
    topology = Topology(Sizes(tensor=3), 1)
    context = context_at(topology, Groups())
    layer = VocabEmbedding(context, LayerSplit(ParallelGroup(1, 3)), 307, 4, Init("normal", 0.5))
    with pytest.raises(RuntimeError, match=f"index {token} is out of bounds"):
        layer(torch.tensor([[1, token]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dropout_grows_what_it_keeps_by_what_it_drops(dtype: torch.dtype) -> None:
    """It is the exact product, rounded once: 1 / 0.9 itself would be off by 0.16 % in bf16."""
    streams = RandomStreams(7, torch.device("cpu"))
    streams.position(Microbatch(0, 1, 0, {}), 0, 0)
    x = torch.linspace(1, 2, 64 * 1024, dtype=torch.float64).to(dtype).requires_grad_()
    y = ReplicatedDropout(0.1, streams).train()(x)
    kept = y != 0
    assert 0.88 < kept.double().mean() < 0.92
    assert torch.equal(y[kept], (x[kept].double() / 0.9).to(dtype))
    y.backward(x.detach())
    assert x.grad is not None
    assert torch.equal(x.grad, y)


def test_dropout_keeps_one_byte_a_value() -> None:
    streams, saved = RandomStreams(7, torch.device("cpu")), []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ReplicatedDropout(0.1, streams).train()(torch.ones(32, 8, requires_grad=True))
    assert saved == [32 * 8]


def test_one_rank_drops_the_values_that_layers_without_a_split_drop() -> None:
    context, x = single_process_context(), torch.ones(64, 8)
    dropped = []
    for layers in (
        DenseLayers(context),
        TensorLayers(context, LayerSplit(context.groups.parallel_group(context.topology, "tensor"))),
    ):
        context.rng.position(Microbatch(0, 1, 0, {}), 2, 3)
        dropped.append(layers.dropout(0.5).train()(x))
    assert torch.equal(*dropped)
    assert 0 < dropped[0].count_nonzero() < x.numel()
