"""The executor: runs one stage's lowered instructions. It knows actions and messages, but no schedule by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch.autograd import profiler
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_run.contracts.activity import Activity
from megatron_run.errors import PluginError, locate

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts import Boundary, Chunk, ChunkOut, Microbatch
    from megatron_run.contracts.activity import PhaseName
    from megatron_run.contracts.schedule import Action
    from megatron_run.pipeline.lower import Instruction, Message
    from megatron_run_engine.runtime.gradients import GradientAccumulator
    from megatron_run_engine.runtime.messages import Messenger, Tensors

#: The fields of a microbatch as ``Model.boundary`` sees it: fields differ between the two stages of a message.
_NO_FIELDS: Mapping[str, Tensor] = MappingProxyType({})
#: (microbatch, chunk)
Key = tuple[int, int]
#: The phase that each operation belongs to. ``S`` computes nothing.
_PHASES: Mapping[str, PhaseName] = MappingProxyType(
    {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "R": "recompute", "S": "gradient-reduce"}
)


@dataclass(frozen=True)
class StepInputs:
    """The trainer's callbacks for one step or one evaluation.

    ``microbatch`` loads microbatch m for this stage. ``boundary`` gives the shapes and dtypes of its messages, the same
    on every stage; it sees the microbatch without fields. ``report`` takes (microbatch, loss name, sum, weight), the
    last two as scalars; without it losses are dropped. ``seed`` maps (loss name, weight) to the gradient with which
    that loss starts its backward; it is None without a backward. ``start_grad_sync`` is called with a chunk after the
    chunk's last backward.
    """

    microbatch: Callable[[int], Microbatch]
    boundary: Callable[[Microbatch], Boundary]
    report: Callable[[int, str, Tensor, Tensor], None] | None = None
    seed: Callable[[str, Tensor], Tensor] | None = None
    start_grad_sync: Callable[[int], None] | None = None


@dataclass
class StepRecord:
    """The record of a step: actions in order, peak number of (microbatch, chunk) pairs in flight, logits if any.

    ``times`` holds the start and end of each action's computation by the clock passed to ``run``; empty without one.
    """

    executed: list[Action] = field(default_factory=list)
    peak_in_flight: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)
    times: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class _InFlight:
    """The needs of a backward from its forward: the inputs, and graph edges instead of outputs.

    Inputs and outputs are x and then what is beside it, in the order of the boundary; none at the ends of the model. An
    output without a backward has no edge.

    An edge keeps the autograd graph alive but not the output's storage, which is freed once its message is consumed
    (Megatron-LM frees it by hand: ``deallocate_output_tensor``).
    """

    inputs: Tensors
    outputs: tuple[GradientEdge | None, ...]
    losses: tuple[tuple[GradientEdge, Tensor], ...]


class Executor:
    """Interprets instructions over the chunks of one stage.

    Errors name ``rank``; ``activity`` is updated with each action.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        gradients: GradientAccumulator,
        messenger: Messenger,
        rank: int,
        activity: Activity | None = None,
    ) -> None:
        self._chunks, self._gradients, self._messenger, self._rank = chunks, gradients, messenger, rank
        self._activity = activity or Activity()
        self._handlers: dict[str, Callable[[Action, Tensors], Tensors | None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_gradient,
            "W": self._weight_gradient,
            "R": self._recompute,
            "S": self._nothing,
        }

    def run(
        self, program: Sequence[Instruction], inputs: StepInputs, clock: Callable[[], float] | None = None
    ) -> StepRecord:
        """Run ``program`` to its end, after which no message is in flight.

        With ``clock``, the record holds when each action was computed, in the clock's unit and without waits. Every
        exception names its rank and action: a :class:`RunError` in its origin, any other in a note.
        """
        self._inputs, self._record, self._clock = inputs, StepRecord(), clock
        self._microbatches: dict[int, Microbatch] = {}
        self._boundaries: dict[int, Boundary] = {}
        self._in_flight: dict[Key, _InFlight] = {}
        self._to_recompute: dict[Key, Tensors] = {}
        self._recomputed = {(a.microbatch, a.chunk) for a in (i.action for i in program) if a.op == "R"}
        done = 0
        try:
            while done < len(program):
                self._step(program[done])
                done += 1
            self._messenger.flush()
        except (Exception, SystemExit) as error:
            locate(error, f"rank {self._rank}, {_place(program, done)}")
            raise
        return self._record

    def _step(self, instruction: Instruction) -> None:
        """Post receives, wait for the input, retire sends, compute, send the output, start a gradient sync."""
        action = instruction.action
        for message in instruction.post:
            self._messenger.post(message, self._boundary(message.microbatch), one_order=instruction.one_order)
        received = self._messenger.wait(instruction.receive) if instruction.receive else ()
        # Only after the wait: what has just arrived proves that these sends were consumed.
        self._messenger.retire(instruction.retire)
        result = self._compute(action, received)
        self._record.executed.append(action)
        if instruction.send:
            if not result:
                raise _missing(instruction.send)
            self._messenger.send(instruction.send, result, self._boundary(action.microbatch))
        if instruction.sync and self._inputs.start_grad_sync is not None:
            self._activity.enter("gradient-reduce", action)
            self._inputs.start_grad_sync(action.chunk)

    def _compute(self, action: Action, received: Tensors) -> Tensors | None:
        self._activity.enter(_PHASES[action.op], action)
        if not profiler._is_profiler_enabled:  # a range costs ten microseconds also when nothing records it
            return self._timed(action, received)
        with profiler.record_function(str(action)):
            return self._timed(action, received)

    def _timed(self, action: Action, received: Tensors) -> Tensors | None:
        if self._clock is None:
            return self._handlers[action.op](action, received)
        start = self._clock()
        result = self._handlers[action.op](action, received)
        self._record.times.append((start, self._clock()))
        return result

    def _forward(self, action: Action, inputs: Tensors) -> Tensors:
        key = (action.microbatch, action.chunk)
        if key in self._recomputed:
            self._to_recompute[key] = inputs  # this forward keeps its inputs only; R builds the graph
        with_graph = self._inputs.seed is not None and key not in self._recomputed
        out, outputs = self._call(action, inputs, with_graph=with_graph)
        if self._inputs.report is not None:
            for name, (total, weight) in out.losses.items():
                self._inputs.report(action.microbatch, name, total.detach(), weight.detach())
        if out.logits is not None:
            self._record.logits[action.microbatch] = out.logits.detach()
        return tuple([output.detach() for output in outputs])

    def _recompute(self, action: Action, received: Tensors) -> None:
        # Losses were reported by the forward already.
        self._call(action, self._to_recompute.pop((action.microbatch, action.chunk)), with_graph=True)

    def _backward(self, action: Action, gradients: Tensors) -> Tensors | None:
        """Backpropagate the outputs' gradients and the losses' seeds; return the inputs' gradients."""
        flight = self._in_flight.pop((action.microbatch, action.chunk))  # the last reference to the graph
        roots = [edge for edge, _ in flight.losses]
        seeds = [seed for _, seed in flight.losses]
        # Lowering receives gradients for every position but the last.
        for edge, gradient in zip(flight.outputs, gradients, strict=True):
            if edge is not None:
                roots.append(edge)
                seeds.append(gradient)
        # One call for all roots: a call per root would visit shared nodes twice, and fail on the freed graph.
        if roots:
            torch.autograd.backward(roots, seeds)
        if not flight.inputs or flight.inputs[0].grad is None:
            return None
        return tuple([torch.zeros_like(x) if x.grad is None else x.grad for x in flight.inputs])

    def _input_gradient(self, action: Action, gradients: Tensors) -> Tensors | None:
        with self._gradients.deferring((action.microbatch, action.chunk)):
            return self._backward(action, gradients)

    def _weight_gradient(self, action: Action, received: Tensors) -> None:
        self._gradients.run_deferred((action.microbatch, action.chunk))

    def _nothing(self, action: Action, received: Tensors) -> None:
        """Compute nothing: S only marks where a gradient sync starts, which every instruction may do."""

    def _call(self, action: Action, inputs: Tensors, *, with_graph: bool) -> tuple[ChunkOut, Tensors]:
        """Run the chunk; return what it returned, and of that what goes to the next position."""
        microbatch, x = self._microbatch(action.microbatch), inputs[0] if inputs else None
        beside = dict(zip(self._boundary(action.microbatch).beside, inputs[1:], strict=True)) if inputs[1:] else {}
        if with_graph:
            for each in inputs:
                each.requires_grad_()  # makes a received tensor a leaf: its .grad goes to the previous stage
        with torch.set_grad_enabled(with_graph):
            out = self._chunks[action.chunk](x, microbatch, **beside)
        outputs = () if out.x is None else (out.x, *self._beside(action, out))
        if with_graph:
            self._in_flight[action.microbatch, action.chunk] = self._keep(inputs, outputs, out.losses)
            self._record.peak_in_flight = max(self._record.peak_in_flight, len(self._in_flight))
        return out, outputs

    def _beside(self, action: Action, out: ChunkOut) -> Iterable[Tensor]:
        """The tensors that go along with x, in the order of the boundary."""
        declared = self._boundary(action.microbatch).beside
        if out.beside.keys() != declared.keys():
            returned, wanted = (", ".join(sorted(names)) or "nothing" for names in (out.beside, declared))
            raise PluginError(
                f"the chunk returned {returned} beside x, and the model's boundary declares {wanted}",
                fix="make ChunkOut.beside and Boundary.beside name the same tensors",
            )
        return (out.beside[name] for name in declared)

    def _keep(self, inputs: Tensors, outputs: Tensors, reported: Mapping[str, tuple[Tensor, Tensor]]) -> _InFlight:
        seed = self._inputs.seed
        assert seed is not None  # a graph is built only for a backward
        # An auxiliary loss may not depend on any parameter (a constant, or a frozen router): it has no backward.
        losses = [(get_gradient_edge(total), seed(n, w)) for n, (total, w) in reported.items() if total.requires_grad]
        # Nor has the output of a chunk that holds a frozen embedding alone.
        edges = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
        return _InFlight(inputs, tuple(edges), tuple(losses))

    def _microbatch(self, index: int) -> Microbatch:
        if index not in self._microbatches:
            with self._activity.within("data", index):
                self._microbatches[index] = self._inputs.microbatch(index)
        return self._microbatches[index]

    def _boundary(self, index: int) -> Boundary:
        if index not in self._boundaries:
            self._boundaries[index] = self._inputs.boundary(replace(self._microbatch(index), fields=_NO_FIELDS))
        return self._boundaries[index]


def _place(program: Sequence[Instruction], index: int) -> str:
    """The name of the instruction at ``index`` in errors, counted from 0 as the verifier counts."""
    if index == len(program):
        return "the end of its actions"
    return f"action {index}, {program[index].action}"


def _missing(message: Message) -> PluginError:
    """The error for a chunk without an output, or without an input gradient, to send."""
    reason = {"x": "the chunk returned no x", "g": "what the chunk returned does not depend on its input x"}
    return PluginError(
        f"{message} does not exist",
        why=reason[message.kind],
        fix="every chunk but the last must return an x that depends on its input x",
    )
