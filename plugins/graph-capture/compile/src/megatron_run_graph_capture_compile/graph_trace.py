"""Traces a region once, forward and backward, into graphs of tensor operations without Python.

The region itself runs, on zeros, and a mode below autograd writes down every operation. So a layer may contain any
Python and any autograd function; nothing of it is left in the graphs. Three parts come out of one trace:

- the forward;
- the backward as far as input gradients and those of parameters that autograd accumulates (action I);
- the products that layers submit to the accumulator (action W), with their operands as inputs.

Tensors that the region reads from elsewhere, such as parameters and rotation tables, become inputs of the graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._C._distributed_c10d import FakeWork
from torch.distributed.distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from megatron_run.errors import GraphCaptureError
from megatron_run_engine.capture import call, kept_streams, run_backward, zeros_like

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Region
    from megatron_run_engine.runtime import BuildContext

_aten = torch.ops.aten
_functional = torch.ops._c10d_functional
#: Identifies what the traced backward submits; no action has it.
_TRACED = (-1, -1)
#: Kinds of a graph's inputs, in their order.
_INPUTS = ("input", "operand", "read", "draw", "gradient")


@dataclass(frozen=True)
class Draw:
    """A random mask: ones with probability ``p`` where ``like`` (on the meta device) has values."""

    like: Tensor
    device: torch.device
    p: float
    generator: torch.Generator | None

    def __call__(self) -> Tensor:
        """Draw it from the stream's present position."""
        like = self.like
        mask = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=self.device)
        return mask.bernoulli_(self.p, generator=self.generator)


@dataclass(frozen=True)
class Trace:
    """One region as graphs.

    ``joint`` maps (inputs, ``read``, draws, gradients of the outputs in ``roots``) to (outputs, gradients of
    ``wanted``, operands of ``late``), in that order. ``late`` adds to the ``main_grad`` of ``submitted``: it takes
    the operands, then ``late_read``. ``wanted`` holds an index for an input, and a parameter for itself. ``inputs``
    and ``gradients`` are zeros.
    """

    joint: fx.GraphModule
    inputs: tuple[Tensor, ...]
    read: tuple[Tensor, ...]
    draws: tuple[Draw, ...]
    gradients: tuple[Tensor, ...]
    outputs: int
    roots: tuple[int, ...]
    wanted: tuple[int | Parameter, ...]
    late: fx.GraphModule | None
    late_read: tuple[Tensor, ...]
    submitted: tuple[Parameter, ...]
    device: torch.device


def trace(region: Region, examples: Sequence[Tensor], context: BuildContext) -> Trace:
    """Run ``region`` forward and backward on zeros like ``examples``, twice; collectives run too.

    ``main_grad`` of its parameters may change; parameters and random streams do not. Raises
    :class:`GraphCaptureError` for a layer that computes by other means than PyTorch's operations: what it makes seems
    to come from elsewhere, but is another tensor each time.
    """
    first, second = (_trace(region, examples, context) for _ in range(2))
    foreign = next((y for x, y in zip(first.read, second.read, strict=False) if x is not y), None)
    if foreign is not None:
        raise GraphCaptureError(
            f"{region} cannot be compiled",
            why=f"a tensor {tuple(foreign.shape)} comes from the host or from other code than PyTorch's operations",
            fix="leave it out of graph-capture.scope, or choose other layers",
        )
    return second


def _trace(region: Region, examples: Sequence[Tensor], context: BuildContext) -> Trace:
    inputs = [zeros_like(example, context.device) for example in examples]
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    parameters = tuple(dict.fromkeys(p for segment in region.segments for p in segment.params if p.requires_grad))
    with kept_streams(context.rng.streams):
        recorder = _Recorder()
        for leaf in leaves:
            recorder.take("input", leaf)
        with torch.enable_grad(), recorder:
            outputs = call(region, leaves, recompute=False)
        roots = tuple(index for index, output in enumerate(outputs) if output.requires_grad)
        gradients = [recorder.take("gradient", torch.zeros_like(outputs[index])) for index in roots]
        sources: list[int | Parameter] = [i for i, x in enumerate(leaves) if x.requires_grad]
        sources += parameters
        wanted = [leaves[each] if isinstance(each, int) else each for each in sources]
        with context.gradients.deferring(_TRACED), recorder:
            found = run_backward([outputs[index] for index in roots], gradients, wanted)
        late = _Recorder(recorder)
        with context.gradients.recording() as submitted, late:
            context.gradients.run_deferred(_TRACED)
    kept = [(source, g) for source, g in zip(sources, found, strict=True) if g is not None]
    return Trace(
        joint=recorder.finish([*outputs, *(gradient for _, gradient in kept), *late.operands]),
        inputs=tuple(leaf.detach() for leaf in leaves),
        read=tuple(recorder.taken["read"]),
        draws=tuple(recorder.draws),
        gradients=tuple(gradients),
        outputs=len(outputs),
        roots=roots,
        wanted=tuple(source for source, _ in kept),
        late=late.finish([]) if submitted else None,
        late_read=tuple(late.taken["read"]),
        submitted=tuple(submitted),
        device=context.device,
    )


class _Recorder(TorchDispatchMode):
    """Writes operations down as nodes of a graph, while they run.

    A recorder with a ``parent`` takes what the parent's operations made as inputs too: its ``operands``, nodes of the
    parent. ``taken`` are the inputs by kind, of which those that are ``read`` were found on the way.
    """

    def __init__(self, parent: _Recorder | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.graph, self.draws, self.operands = fx.Graph(), list[Draw](), list[fx.Node]()
        self.taken: dict[str, list[Tensor]] = {kind: [] for kind in _INPUTS}
        self._parent = parent
        self._nodes: dict[int, fx.Node] = {}
        self._inputs: dict[str, list[fx.Node]] = {kind: [] for kind in _INPUTS}
        self._alive: list[Tensor] = []  # so that an id stands for one tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True makes torch import the compiler, only to disable it here."""
        return False

    def take(self, kind: str, tensor: Tensor) -> Tensor:
        """Make ``tensor`` an input of the graph."""
        node = self.graph.placeholder(f"{kind}_{len(self.taken[kind])}")
        self._inputs[kind].append(node)
        self.taken[kind].append(tensor)
        self._nodes[id(tensor)] = node
        return tensor

    def made(self, tensor: Tensor) -> fx.Node | None:
        """The node whose value ``tensor`` is, None for a tensor from outside."""
        node = self._nodes.get(id(tensor))
        return None if node in self._inputs["read"] else node

    def finish(self, results: Sequence[Tensor | fx.Node]) -> fx.GraphModule:
        """The graph from the inputs, by kind, to ``results``."""
        outputs = tuple(x if isinstance(x, fx.Node) else self._node(x) for x in results)
        ordered, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in (each for kind in _INPUTS for each in self._inputs[kind]):
            copies[node] = ordered.placeholder(node.name)
        for node in self.graph.nodes:
            if node.op != "placeholder":
                copies[node] = ordered.node_copy(node, copies.__getitem__)
        ordered.output(tuple(copies[node] for node in outputs))
        return fx.GraphModule({}, ordered)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is _aten.bernoulli_.float and (args[0].device.type == "cpu" or kwargs.get("generator") is not None):
            return self._draw(args, kwargs)
        before = () if func.namespace == "c10d" else (tree_map(self._argument, tuple(args)), self._arguments(kwargs))
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            self._collective(func, args)
            result = _waited(result)
        else:
            self._give(self.graph.call_function(func, *before), result)
        return result

    def _draw(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Hoist a mask out of the graph: masks follow the streams' positions, and equal those of an eager run."""
        target: Tensor = args[0]
        like = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype, device="meta")
        self.draws.append(Draw(like, target.device, args[1] if len(args) > 1 else kwargs["p"], kwargs.get("generator")))
        mask = self.take("draw", self.draws[-1]())
        node = self.graph.call_function(_aten.copy_.default, (self._node(target), self._node(mask)))
        self._give(node, target.copy_(mask))
        return target

    def _collective(self, func: Any, args: Sequence[Any]) -> None:
        """Write a collective down as a functional one, which compilers know, and a copy to where it leaves it."""
        ran: tuple[Any, ...]
        if func is torch.ops.c10d.allreduce_.default:
            ((target,), group, operation) = args[:3]
            ran = (_functional.all_reduce.default, self._node(target), _reduction(target, group, operation))
        elif func is torch.ops.c10d._allgather_base_.default:
            target, part, group = args[:3]
            ran = (_functional.all_gather_into_tensor.default, self._node(part), ProcessGroup.unbox(group).size())
        elif func is torch.ops.c10d._reduce_scatter_base_.default:
            target, whole, group, operation = args[:4]
            reduction, size = _reduction(target, group, operation), ProcessGroup.unbox(group).size()
            ran = (_functional.reduce_scatter_tensor.default, self._node(whole), reduction, size)
        else:
            raise GraphCaptureError(f"graph-capture=compile does not know the collective {func}")
        begun = self.graph.call_function(ran[0], (*ran[1:], ProcessGroup.unbox(group).group_name))
        waited = self.graph.call_function(_functional.wait_tensor.default, (begun,))
        node = self.graph.call_function(_aten.copy_.default, (self._node(target), waited))
        self._give(node, target)

    def _give(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, Tensor):
            self._nodes[id(result)] = node
            self._alive.append(result)
        elif isinstance(result, tuple | list):
            for index, each in enumerate(result):
                if isinstance(each, Tensor):
                    self._give(self.graph.call_function(operator.getitem, (node, index)), each)

    def _arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tree_map(self._argument, value) for name, value in kwargs.items()}

    def _argument(self, value: Any) -> Any:
        return self._node(value) if isinstance(value, Tensor) else value

    def _node(self, tensor: Tensor) -> fx.Node:
        """The node that made ``tensor``; a tensor from outside becomes an input."""
        if id(tensor) not in self._nodes:
            made = None if self._parent is None else self._parent.made(tensor)
            if made is not None:
                self.operands.append(made)
                self.take("operand", tensor)
            else:
                self.take("read", tensor)
        return self._nodes[id(tensor)]


def _reduction(like: Tensor, group: Any, operation: Any) -> str:
    """The name of ``operation``, of which only a boxed form arrives here: found by reducing a one of each rank."""
    one = torch.ones((), device=like.device)
    *_, work = torch.ops.c10d.allreduce_([one], group, operation, None, True)
    work.wait()
    return "max" if one.item() == 1 else "sum"


def _waited(result: Any) -> Any:
    """The result of a collective, waited for here: gloo copies in ``wait``, which must not be written down."""
    *others, work = result if isinstance(result, tuple | list) else (result,)
    work.wait()
    done = FakeWork().boxed()
    return (*others, done) if others else done
