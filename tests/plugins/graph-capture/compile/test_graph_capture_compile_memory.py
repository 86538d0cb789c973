"""What a compiled region holds and writes to: no zeros of its trace, and no clone of what a backward writes over."""

from __future__ import annotations

import gc
import operator
import re
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.library import Library

from megatron_run.contracts import Microbatch, Segment
from megatron_run.contracts.schedule import Action
from megatron_run_engine.nn import CrossEntropy
from megatron_run_graph_capture_compile.capture import CompileCapture, CompileOptions
from megatron_run_graph_capture_compile.compiler import find_compiler
from megatron_run_graph_capture_compile.overwritten import apart, write_over
from megatron_run_testing.build_contexts import single_process_context
from tests.support.interpreted import interpreted

MICROBATCH = Microbatch(0, 1, 0, {})
library = Library("megatron_run_tests", "FRAGMENT")
library.define("write_slope(Tensor x, Tensor(a!) out, Tensor grad) -> ()")


def _write_slope(x: Tensor, out: Tensor, grad: Tensor) -> None:
    out.copy_(x * grad[:, None])


library.impl("write_slope", _write_slope, "CPU")
library.impl("write_slope", lambda *_: None, "Meta")
WRITE = torch.ops.megatron_run_tests.write_slope.default


class HalfSquares(torch.autograd.Function):
    """Half the sum of squares of each row; as the loss does, the backward writes the gradient over its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum(-1) / 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out: Tensor = x.detach()
        torch.ops.megatron_run_tests.write_slope(x, out, grads[0])
        return out


class Kept:
    """A compiler that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs = list[fx.GraphModule]()

    def __call__(self, graph: fx.GraphModule, examples: Any) -> Any:
        self.graphs.append(graph)
        return graph

    def written(self) -> list[bool]:
        """Of each write in the graphs, whether it is to an input."""
        found = []
        for graph in self.graphs:
            for node in graph.graph.nodes:
                if node.target is torch.ops.higher_order.auto_functionalized_v2:
                    found.append(False)
                elif node.target is WRITE:
                    found.append(node.kwargs["out"].op == "placeholder")
        return found


def compiled(fn: Any, compiler: Any, outputs: tuple[str, ...], *inputs: Tensor) -> Any:
    """A function that runs a compiled layer, which is ``fn`` alone."""
    context = single_process_context(dtype=torch.float32)
    capture = CompileCapture(context, CompileOptions(scope=("attn",)), lambda: compiler)
    names = tuple(f"x{index}" for index in range(len(inputs)))
    (region,) = capture.regions([[Segment("attn", 3, 0, fn, names, outputs, ())]])
    examples = tuple(
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
        for x in inputs
    )
    capture.capture([region], [Action("F", 0, 0), Action("B", 0, 0)], {region: examples})
    return lambda *given: capture.replay(region, MICROBATCH, *given)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def squares_of_product(x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = HalfSquares.apply(x @ y)  # type: ignore[no-untyped-call]  # torch's
    return found


def test_a_backward_writes_over_what_its_own_forward_has_saved_and_runs_once() -> None:
    x, y = values(5, 3).requires_grad_(), values(3, 4)
    kept = Kept()
    (loss,) = compiled(squares_of_product, kept, ("loss",), x, y)(x, y)
    assert kept.written() == [True]
    loss.sum().backward(retain_graph=True)
    torch.testing.assert_close(x.grad, x.detach() @ y @ y.t())
    with pytest.raises(RuntimeError, match="a compiled backward ran twice"):
        loss.sum().backward()


def writes(*, reads_after: bool = False, **described: Any) -> fx.GraphModule:
    """A graph without writes, whose operation wrote over its first input."""
    graph = fx.Graph()
    saved, gradient = graph.placeholder("saved"), graph.placeholder("gradient")
    same = graph.call_function(torch.ops.aten.detach.default, (saved,))
    arguments = {"x": saved, "grad": gradient, "_out_base_index": 0, "_all_bases": [same], **described}
    operation = torch.ops.higher_order.auto_functionalized_v2
    results = [graph.call_function(operator.getitem, (graph.call_function(operation, (WRITE,), arguments), 1))]
    if reads_after:
        seen = graph.call_function(torch.ops.aten.view.default, (saved, [-1]))
        results.append(graph.call_function(torch.ops.aten.neg.default, (seen,)))
    graph.output(tuple(results))
    return fx.GraphModule({}, graph)


def test_a_write_to_an_input_that_may_change_needs_no_other_memory() -> None:
    graph, saved = writes(), values(5, 3)
    expected = 2 * saved
    assert write_over(graph, {"saved"}) == {"saved"}
    (result,) = graph(saved, torch.full((5,), 2.0))
    assert result.data_ptr() == saved.data_ptr()
    assert torch.equal(saved, expected)


@pytest.mark.parametrize(
    ("spare", "settings"),
    [
        pytest.param((), {}, id="another may read it"),
        pytest.param(("saved",), {"reads_after": True}, id="a view of it is read afterwards"),
        pytest.param(
            ("saved",), {"_out_slice_dim": 0, "_out_slice_start": 0, "_out_slice_end": 5}, id="a part is written to"
        ),
    ],
)
def test_an_input_that_is_needed_stays(spare: tuple[str, ...], settings: dict[str, Any]) -> None:
    graph, saved = writes(**settings), values(5, 3)
    expected = saved.clone()
    assert not write_over(graph, spare)
    results = graph(saved, torch.full((5,), 2.0))
    assert torch.equal(saved, expected)
    assert torch.equal(results[0], 2 * expected)


def test_memory_that_two_have_is_not_apart() -> None:
    x, y, z = values(4), values(4), values(4)
    assert apart([x, y, z, z[1:]], [y.view(2, 2)]) == {0}


def test_a_region_keeps_none_of_the_zeros_that_it_was_traced_with() -> None:
    """They are as large as its inputs and results, for every layer."""
    x = values(7, 11, 13).requires_grad_()
    run = compiled(lambda x: x.exp().transpose(0, 1) * 2, Kept(), ("y",), x)
    gc.collect()
    sizes = {x.numel()}
    assert not [
        each
        for each in gc.get_objects()
        if type(each) is Tensor and each is not x and not each.is_meta and each.numel() in sizes
    ]
    (y,) = run(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().exp())


def test_a_result_without_a_gradient_counts_as_zeros() -> None:
    x = values(5, 3).requires_grad_()
    first, _ = compiled(lambda x: (x * 2, x * 3), Kept(), ("first", "second"), x)(x)
    first.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((5, 3), 2.0))


def code_of_head_and_loss() -> list[str]:
    """What inductor makes of a product and the loss by a GPU's kernels: forward and backward."""
    from torch._inductor.graph import GraphLowering

    written = list[str]()
    GraphLowering.save_output_code = written.append  # its hook for tests
    loss = CrossEntropy(vocab=20)
    x, weight = values(4, 2, 16).requires_grad_(), values(24, 16)
    labels = torch.arange(8).view(2, 4)
    run = compiled(
        lambda x, weight, labels: loss(x @ weight.t(), labels),
        find_compiler("inductor", "default"),
        ("loss",),
        *(x, weight, labels),
    )
    (found,) = run(x, weight, labels)
    found.sum().backward()
    exact = x.detach().double().requires_grad_()
    logits = (exact @ weight.double().t())[..., :20].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, labels.t().flatten(), reduction="sum").backward()
    torch.testing.assert_close(x.grad, exact.grad, check_dtype=False, rtol=1e-5, atol=1e-5)
    return written


def made(code: str) -> list[int]:
    """The number of values of each tensor that inductor's ``code`` allocates."""
    return [prod(map(int, re.findall(r"\d+", shape))) for shape in re.findall(r"empty_strided_cpu\(\(([^)]*)\)", code)]


@pytest.mark.nightly  # the C++ compiler works for seconds; the graphs' writes are counted every time
@pytest.mark.multiproc
@pytest.mark.slow
def test_inductor_lets_the_loss_write_its_gradient_over_the_logits() -> None:
    """A clone of them would be the largest tensor of a step once more."""
    ahead, back = interpreted(code_of_head_and_loss)
    logits = 8 * 24
    assert logits in made(ahead)
    assert "write_loss_gradient" in back
    assert logits not in made(back)
