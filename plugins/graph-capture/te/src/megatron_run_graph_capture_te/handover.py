"""The arguments of Transformer Engine, made from the same regions and order as any capture, and what it hands back.

The library numbers forward passes by chunk, then by microbatch, then by region. It takes the k-th forward and the k-th
backward of a chunk for its k-th microbatch, whatever the schedule meant. What it is handed are the recorded copies of
:func:`megatron_run_engine.capture.recordings`, in the place of microbatches, checked first.

Its callable for one region and microbatch runs between two autograd functions of ours. They check the order before each
replay, report weight gradients after it, and copy tensors that leave the chunk. Other results of a graph are its own
memory, valid until its backward has replayed.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_run.errors import GraphCaptureError, InputError, RunError
from megatron_run_engine.capture import Slots, call, shared_slots, zeros_like

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Action, Region, Segment
    from megatron_run_engine.capture import Hooks, Linted, Pass

_INSTEAD = "choose --plugin graph-capture=partial"


class RegionModule(nn.Module):
    """A region as the module that Transformer Engine expects: tensors to tensors, with the region's parameters."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region
        self.read = nn.ParameterList({id(p): p for segment in region.segments for p in segment.params}.values())

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the segments."""
        return call(self._region, tensors)


@dataclass(frozen=True)
class Handover:
    """The arguments of ``make_graphed_callables``, and ``places``: region and copy of each forward pass.

    Copies that are never in flight together share the tensors of ``sample_args``. ``reuses_buffers`` lets the library
    share its own buffers in the same way.
    """

    modules: tuple[RegionModule, ...]
    sample_args: list[tuple[Tensor, ...]]
    order: list[int]
    layers_per_chunk: list[int]
    reuses_buffers: bool
    places: tuple[tuple[Region, int], ...]
    slot_count: int

    def call(self, make_graphed_callables: Callable[..., Any], warmup: int) -> tuple[Callable[..., Any], ...]:
        """Let the library record everything: one callable for each of ``places``."""
        with warnings.catch_warnings():
            # It records a backward of every region, also of those that have none.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            made = make_graphed_callables(
                self.modules,
                self.sample_args,
                num_warmup_iters=warmup,
                allow_unused_input=True,
                sample_kwargs=[{} for _ in self.sample_args],  # releases up to 2.10 fail without it
                _order=self.order,
                _num_layers_per_chunk=self.layers_per_chunk,
                _reuse_graph_input_output_buffers=self.reuses_buffers,
            )
        if not isinstance(made, tuple) or len(made) != len(self.places):
            raise GraphCaptureError(
                f"Transformer Engine did not return {len(self.places)} callables, one for each forward pass",
                fix=f"see which version is installed, or {_INSTEAD}",
            )
        return made


def prepare(
    of_chunk: Sequence[Sequence[Region]],
    order: Sequence[Pass],
    examples: Mapping[Region, tuple[Tensor, ...]],
    linted: Mapping[Region, Linted],
    device: torch.device,
) -> Handover:
    """Make the arguments for the regions of each chunk, whose passes are recorded in ``order``.

    Raises :class:`GraphCaptureError` for unsupported regions.
    """
    slots = shared_slots(order)
    numbers = {chunk: number for number, chunk in enumerate(c for c, regions in enumerate(of_chunk) if regions)}
    copies = sorted({each.copy for each in order})
    places = tuple((region, copy) for chunk in numbers for copy in copies for region in of_chunk[chunk])
    regions = dict.fromkeys(region for region, _ in places)
    for region in regions:
        _check_region(region, examples[region], linted[region])
    static = _static_inputs(places, of_chunk, examples, slots, device)
    signs = {"F": 1, "B": -1}
    return Handover(
        modules=tuple(RegionModule(region) for chunk in numbers for region in of_chunk[chunk]),
        sample_args=list(static),
        order=[signs[kind] * (numbers[chunk] + 1) for kind, chunk, _ in order if kind in signs and chunk in numbers],
        layers_per_chunk=[len(of_chunk[chunk]) for chunk in numbers],
        reuses_buffers=can_share((examples[region], linted[region].outputs) for region in regions),
        places=places,
        slot_count=slots.count,
    )


def can_share(regions: Iterable[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> bool:
    """Whether the library may share buffers among regions with these inputs and outputs.

    It shares inputs of equal shapes and types, and gradients of outputs that have one, of equal shapes and types. It
    takes for granted that such inputs agree in which of them have a gradient, and such outputs in which have none.
    """
    seen: dict[Hashable, Hashable] = {}
    for inputs, outputs in regions:
        graded = [output for output in outputs if output.requires_grad]
        for what, tensors, facts in (("inputs", inputs, inputs), ("gradients", graded, outputs)):
            alike = what, *((tuple(x.shape), x.dtype) for x in tensors)
            having = tuple(x.requires_grad for x in facts)
            if seen.setdefault(alike, having) != having:
                return False
    return True


def _static_inputs(
    places: Sequence[tuple[Region, int]],
    of_chunk: Sequence[Sequence[Region]],
    examples: Mapping[Region, tuple[Tensor, ...]],
    slots: Slots,
    device: torch.device,
) -> Iterator[tuple[Tensor, ...]]:
    """One tuple per forward pass, shared by passes of equal slot, position in the chunk, and shapes."""
    made: dict[object, tuple[Tensor, ...]] = {}
    for region, copy in places:
        kind = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in examples[region])
        key = slots.of[region.chunk, copy], of_chunk[region.chunk].index(region), kind
        if key not in made:
            made[key] = tuple(zeros_like(example, device) for example in examples[region])
        yield made[key]


def check_order(actions: Sequence[Action]) -> None:
    """Raise :class:`GraphCaptureError` for orders that the library would misread, or whose tensors it would reuse."""
    seen: dict[tuple[str, int], int] = defaultdict(int)
    for index, action in enumerate(actions):
        kind = "F" if action.op == "F" else "B" if action.op in "BI" else ""
        if action.op == "W":
            raise GraphCaptureError(
                f"action {index}, {action}, cannot be served by graph-capture=te",
                why="what layers put off to W reads outputs that Transformer Engine has given to others by then",
                fix=_INSTEAD,
            )
        if kind and action.microbatch != seen[kind, action.chunk]:
            raise GraphCaptureError(
                f"action {index}, {action}, cannot be served by graph-capture=te",
                why=f"Transformer Engine would take it for microbatch {seen[kind, action.chunk]}",
                fix=_INSTEAD,
            )
        seen[kind, action.chunk] += 1


def check_inputs(regions: Iterable[Region], chunks: Sequence[Sequence[Segment]]) -> None:
    """Raise :class:`InputError` for a region that reads nothing but what no segment of all ``chunks`` differentiates.

    Only tokens and the like are published by no segment. What is frozen is found at the capture.
    """
    learned = {name for chunk in chunks for segment in chunk if segment.differentiable for name in segment.outputs}
    for region in regions:
        if region.differentiable and learned.isdisjoint(region.inputs):
            raise _without_gradient(InputError, region)


def _check_region(region: Region, examples: Sequence[Tensor], linted: Linted) -> None:
    if linted.has_backward and not any(example.requires_grad for example in examples):
        raise _without_gradient(GraphCaptureError, region)


def _without_gradient(kind: type[RunError], region: Region) -> RunError:
    return kind(
        f"{region} cannot be captured by graph-capture=te",
        why="nothing that it is given has a gradient, so that nothing would tell when its backward was replayed",
        fix=f"leave {region.segments[0].name} out of graph-capture.scope, or {_INSTEAD}",
    )


@dataclass(frozen=True)
class GraphedRegion:
    """``run`` is the library's callable; ``first`` and ``last`` mark the ends of the region's chunk.

    ``differentiable`` says of each output whether it has a gradient: the library marks none as having none.
    """

    run: Callable[..., Any]
    arrivals: tuple[Parameter, ...]
    first: bool
    last: bool
    differentiable: tuple[bool, ...]

    @property
    def has_backward(self) -> bool:
        """Whether any output can be differentiated."""
        return any(self.differentiable)

    def replay(self, hooks: Hooks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replay the region on ``tensors``; differentiable."""
        hooks.before_forward()
        entered = _Enter.apply(self, hooks, *tensors)  # type: ignore[no-untyped-call]  # torch's
        found = self.run(*entered)
        outputs = found if isinstance(found, tuple) else (found,)
        left: tuple[Tensor, ...] = _Leave.apply(self, hooks, *outputs)  # type: ignore[no-untyped-call]  # torch's
        return left


class _Enter(torch.autograd.Function):
    """Identity in the forward; its backward runs after the library's backward."""

    @staticmethod
    def forward(ctx: Any, region: GraphedRegion, hooks: Hooks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.region, ctx.hooks = region, hooks
        ctx.set_materialize_grads(False)  # an input without gradient stays None instead of becoming zeros
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.hooks.after_backward()
        copied = ctx.region.first
        return (None, None, *(g.clone() if copied and g is not None else g for g in gradients))


class _Leave(torch.autograd.Function):
    """Identity in the forward, but for copies; its backward runs before the library's backward."""

    @staticmethod
    def forward(ctx: Any, region: GraphedRegion, hooks: Hooks, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.hooks = hooks
        outputs = tuple(tensor.clone() if region.last else tensor.view_as(tensor) for tensor in tensors)
        marked = zip(outputs, region.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in marked if not differentiable))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.hooks.before_backward()
        return (None, None, *gradients)
