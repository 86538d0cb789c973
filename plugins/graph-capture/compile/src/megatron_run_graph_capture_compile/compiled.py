"""Compiled regions: graphs that regions which look alike share, and the autograd function that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from megatron_run.errors import GraphCaptureError
from megatron_run_engine.capture import zeros_like
from megatron_run_graph_capture_compile.overwritten import apart, write_over
from megatron_run_graph_capture_compile.residuals import join_residuals

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run_engine.runtime import GradientAccumulator
    from megatron_run_graph_capture_compile.graph_trace import Trace

#: A compiled graph.
Compiled = Callable[..., Sequence[Tensor]]
#: Compiles a graph for inputs like the examples.
Compiler = Callable[[fx.GraphModule, Sequence[Tensor]], Compiled]


@dataclass(frozen=True)
class Graphs:
    """The compiled forward and backward of regions that look alike.

    ``forward`` takes (inputs, what is read, draws) and returns (outputs, tensors to save). ``backward`` takes those
    inputs of the forward that ``kept`` numbers, what the forward saved, and the outputs' gradients. It may run ``once``
    where it writes over what the forward saved.
    """

    forward: Compiled
    backward: Compiled | None = None
    kept: tuple[int, ...] = ()
    once: bool = False


class GraphStore:
    """Compiles each graph once, however many regions have it, and at most ``limit``: ``compiled`` counts them."""

    def __init__(self, compiler: Compiler, limit: int) -> None:
        self._compiler, self._limit = compiler, limit
        self._graphs: dict[str, Graphs] = {}
        self.compiled = 0

    def get(self, trace: Trace, who: str) -> Graphs | None:
        """The graphs of ``trace``, whose region is called ``who`` in errors; None beyond the limit."""
        key = _key(trace)
        if key not in self._graphs:
            if self.compiled + 1 + bool(trace.gradients) > self._limit:
                return None
            self._graphs[key] = self._make(trace, who)
            self.compiled += 1 + (self._graphs[key].backward is not None)
        return self._graphs[key]

    def _make(self, trace: Trace, who: str) -> Graphs:
        primals = (*trace.inputs, *trace.read, *(draw() for draw in trace.draws))
        with torch.no_grad():
            pure = make_fx(_functional(trace.joint, who), tracing_mode="fake")(*primals, *trace.gradients)
            if not trace.gradients:
                return Graphs(self._compiler(pure, primals))
            join_residuals(pure)
            ahead, back, kept = _split(pure, len(primals), trace.outputs)
            forward = self._compiler(ahead, primals)
            results = forward(*primals)
            saved = results[trace.outputs :]
            names = [node.name for node in back.graph.find_nodes(op="placeholder")][len(kept) :]
            spare = apart(saved, [*primals, *results[: trace.outputs]])
            written = write_over(back, {names[index] for index in spare})
            backward = self._compiler(back, [*(primals[index] for index in kept), *saved, *trace.gradients])
        return Graphs(forward, backward, kept, once=bool(written))


class CompiledRegion:
    """One region: the graphs that it shares, and the tensors that it alone reads."""

    def __init__(self, trace: Trace, graphs: Graphs, gradients: GradientAccumulator) -> None:
        self.graphs, self._gradients, self._device = graphs, gradients, trace.device
        # Their layouts remain: the values, zeros, would be two tensors of the stream's size for each layer.
        self.trace = replace(trace, inputs=_layouts(trace.inputs), gradients=_layouts(trace.gradients))
        self._parameters: tuple[Parameter, ...] = tuple(each for each in trace.wanted if not isinstance(each, int))
        # The result must have a backward too where no input has one, as under a frozen embedding.
        self.submitted = tuple(dict.fromkeys(trace.submitted))

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the forward on the region's inputs; the result is differentiable."""
        inputs = (*tensors, *self._parameters, *self.submitted)
        results: tuple[Tensor, ...] = _Run.apply(self, *inputs)  # type: ignore[no-untyped-call]  # torch's
        return results

    def forward(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """The outputs, and what the backward needs."""
        given = [_laid_out(x, like) for x, like in zip(tensors, self.trace.inputs, strict=True)]
        primals = (*given, *self.trace.read, *(draw() for draw in self.trace.draws))
        results = self.graphs.forward(*primals)
        own = range(len(given), len(given) + len(self.trace.read))  # kept here already, such as parameters
        saved = [primals[index] for index in self.graphs.kept if index not in own]
        return tuple(results[: self.trace.outputs]), [*saved, *results[self.trace.outputs :]]

    def backward(self, saved: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients of ``trace.wanted``; those that layers submit go to the accumulator."""
        trace, graphs, remaining = self.trace, self.graphs, iter(saved)
        assert graphs.backward is not None
        first = len(trace.inputs)
        kept = [
            trace.read[index - first] if first <= index < first + len(trace.read) else next(remaining)
            for index in graphs.kept
        ]
        chosen = [gradients[root] for root in trace.roots]
        given = [
            zeros_like(like, self._device) if gradient is None else _laid_out(gradient, like)
            for gradient, like in zip(chosen, trace.gradients, strict=True)
        ]
        results = graphs.backward(*kept, *remaining, *given)
        if trace.late is not None:
            operands = results[len(trace.wanted) :]
            self._gradients.submit(trace.submitted, partial(trace.late, *operands, *trace.late_read))
        return list(results[: len(trace.wanted)])


class _Run(torch.autograd.Function):
    """``inputs`` are the region's, the parameters whose gradients autograd accumulates, and those submitted."""

    @staticmethod
    def forward(ctx: Any, region: CompiledRegion, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs, saved = region.forward(inputs[: len(region.trace.inputs)])
        ctx.region, ctx.spent = region, False
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*(x for index, x in enumerate(outputs) if index not in region.trace.roots))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        trace = ctx.region.trace
        if ctx.spent:
            raise RuntimeError("a compiled backward ran twice: the first one wrote over what its forward had saved")
        ctx.spent = ctx.region.graphs.once
        found = dict(zip(trace.wanted, ctx.region.backward(ctx.saved_tensors, grads), strict=True))
        parameters = (gradient for source, gradient in found.items() if not isinstance(source, int))
        nothing = (None,) * len(ctx.region.submitted)  # the accumulator has got them
        return None, *(found.get(index) for index in range(len(trace.inputs))), *parameters, *nothing


def _functional(graph: fx.GraphModule, who: str) -> Callable[..., Any]:
    """``graph`` with writes in place turned into new values, those of operations of other libraries included.

    ``torch.func.functionalize`` refuses such operations, as kernels of our own that write over a tensor are. Raises
    :class:`GraphCaptureError` if one of the graph's inputs is written to: its cut in two would lose the write.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize

    def checked(*given: Any) -> Any:
        results = graph(*given)
        if any(torch._functionalize_has_data_mutation(x.elem) for x in given):  # type: ignore[attr-defined]  # torch's
            raise GraphCaptureError(
                f"{who} cannot be compiled",
                why="it writes to a tensor that it reads from elsewhere",
                fix="leave it out of graph-capture.scope",
            )
        return results

    return dispatch_functionalize(checked, FunctionalTensorMode())


def _layouts(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors without values that have the strides of ``tensors``."""
    return tuple(torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta") for x in tensors)


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """X with the strides of ``like``, for which a graph was compiled."""
    if x.stride() == like.stride():
        return x
    return torch.empty_strided(like.size(), like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _split(pure: fx.GraphModule, primals: int, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule, tuple[int, ...]]:
    """Cut a joint graph into forward and backward, so that little is saved and cheap values are computed again.

    Returns which inputs of the forward the backward reads first. The cut is PyTorch's, by a minimum cut in the graph
    (https://dev-discuss.pytorch.org/t/min-cut-optimal-recomputation-i-e-activation-checkpointing-with-aotautograd/467).
    """
    for index, node in enumerate(pure.graph.find_nodes(op="placeholder")):
        # The partitioner goes by these names.
        node.name = f"primals_{index}" if index < primals else f"tangents_{index - primals}"
        node.target = node.name
    pure.recompile()
    ahead, back = min_cut_rematerialization_partition(pure, None, num_fwd_outputs=outputs)
    (output,) = ahead.graph.find_nodes(op="output")
    results = list(output.args[0])
    saved = results[outputs:]
    given = [node for node in saved if node.op == "placeholder"]
    made = [node for node in saved if node.op != "placeholder"]
    output.args = ((*results[:outputs], *made),)
    ahead.recompile()
    return ahead, _reordered(back, [node.name for node in (*given, *made)]), tuple(_number(node) for node in given)


def _reordered(back: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """``back`` with its first inputs in the order of ``names``."""
    nodes = {node.name: node for node in back.graph.find_nodes(op="placeholder")}
    ordered, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*(nodes.pop(name) for name in names), *nodes.values()):
        copies[node] = ordered.node_copy(node, copies.__getitem__)
    for node in back.graph.nodes:
        if node.op != "placeholder":
            copies[node] = ordered.node_copy(node, copies.__getitem__)
    return fx.GraphModule(back, ordered)


def _number(node: fx.Node) -> int:
    return int(node.name.removeprefix("primals_"))


def _key(trace: Trace) -> str:
    """The common traits of two regions that share graphs: operations, and the layout of all inputs."""
    tensors = (*trace.inputs, *trace.read, *(draw.like for draw in trace.draws), *trace.gradients)
    layout = [(tuple(x.shape), x.stride(), x.dtype, str(x.device)) for x in tensors]
    return f"{trace.joint.code}\n{layout}\n{trace.outputs}"
