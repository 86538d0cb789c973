"""The common part of captures by region: chooses regions, checks rules and order, and detects mismatches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from megatron_run.config.values import typed
from megatron_run.contracts import CaptureSize, GraphCapture
from megatron_run.errors import GraphCaptureError, InputError
from megatron_run.errors.wording import plural
from megatron_run.planning.batch_size import total_steps
from megatron_run_engine.capture.fixed_addresses import FixedAddresses
from megatron_run_engine.capture.order import OrderGuard, passes
from megatron_run_engine.capture.regions import STEP, by_chunk, call, check_scope, check_step, choose_regions
from megatron_run_engine.capture.rules import Linted, lint

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts import Microbatch, Region, Segment
    from megatron_run.contracts.schedule import Action
    from megatron_run.contracts.schema import Config, SegmentNames
    from megatron_run_engine.runtime.context import BuildContext

#: The inputs of each region, as tensors without values.
Examples = Mapping["Region", tuple["Tensor", ...]]
#: (step, chunk, microbatch)
_Pair = tuple[int, int, int]


class CaptureOptions(Protocol):
    """The options of every capture by region."""

    @property
    def scope(self) -> tuple[str, ...] | None:
        """The names of the segments to capture; None leaves them to the capture."""
        ...

    @property
    def capture_after(self) -> int:
        """The number of eager steps before a capture."""
        ...

    @property
    def strict(self) -> bool:
        """Whether a mismatch is an error."""
        ...


class Hooks(NamedTuple):
    """Callbacks before the replay of a forward, before that of a backward, and after that of a backward."""

    before_forward: Callable[[], None]
    before_backward: Callable[[], None]
    after_backward: Callable[[], None]


class RecordedRegion(Protocol):
    """One recording of a region. ``arrivals`` are the parameters to whose gradients its backward adds."""

    @property
    def has_backward(self) -> bool:
        """Whether any output can be differentiated."""
        ...

    @property
    def arrivals(self) -> Sequence[Parameter]:
        """The parameters to whose ``main_grad`` its backward adds."""
        ...

    def replay(self, hooks: Hooks, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs, differentiable."""
        ...


@dataclass(frozen=True)
class Recorded:
    """The recordings of a stage. ``copies`` maps (chunk, microbatch) to the copy of the regions that it replays."""

    regions: Mapping[tuple[Region, int], RecordedRegion]
    copies: Mapping[tuple[int, int], int]
    size: CaptureSize


class Event(NamedTuple):
    """A replay, as :class:`OrderGuard` counts it."""

    kind: str
    region: Region
    microbatch: int

    def __str__(self) -> str:
        name = "forward" if self.kind == "F" else "backward"
        return f"the {name} of {self.region} for microbatch {self.microbatch}"


class _Captured(NamedTuple):
    """The recordings, and the facts on which they rely."""

    facts: FixedAddresses
    examples: Examples
    recorded: Recorded
    guard: OrderGuard
    read: frozenset[torch.UntypedStorage]


class RegionCapture(GraphCapture):
    """Captures neighbouring segments of ``options.scope`` together. A subclass records them."""

    def __init__(self, context: BuildContext, options: CaptureOptions) -> None:
        self.context, self._options = context, options
        self.capture_after = options.capture_after
        self.chunks: Sequence[Sequence[Segment]] = ()
        self.linted: dict[Region, Linted] = {}
        self._captured: _Captured | None = None
        self._mismatch = ""
        self._eager: set[_Pair] = set()

    @abstractmethod
    def record(self, regions: Sequence[Region], actions: Sequence[Action], examples: Examples) -> Recorded:
        """Record ``regions``, which keep the rules. Parameters and random streams must be left unchanged.

        ``main_grad`` may be left with any values (:meth:`megatron_run.contracts.GraphCapture.capture`).
        """

    def regions(self, chunks: Sequence[Sequence[Segment]]) -> Sequence[Region]:
        """Return the regions of neighbouring segments in the scope."""
        self.chunks = chunks
        scope = self._options.scope or ()
        check_scope(scope, chunks, self.context)
        return choose_regions(chunks, scope)

    def capture(self, regions: Sequence[Region], actions: Sequence[Action], examples: Examples) -> CaptureSize:
        """Check every region against the rules, then record all."""
        self.lint(regions, examples)
        recorded = self.record(regions, actions, examples)
        self._captured = _Captured(
            FixedAddresses.of(regions, actions),
            dict(examples),
            recorded,
            OrderGuard(self._events(regions, actions, recorded)),
            self.take_read(regions),
        )
        return recorded.size

    def lint(self, regions: Sequence[Region], examples: Examples) -> None:
        """Check every region against the rules."""
        context = self.context
        for region in regions:
            if region not in examples:
                raise GraphCaptureError(f"{region} has not run yet", why="what it is given is not known")
            self.linted[region] = lint(region, examples[region], context.device, context.gradients, context.rng.streams)

    def take_read(self, regions: Sequence[Region]) -> frozenset[torch.UntypedStorage]:
        """Take from the lints what ``regions`` read besides parameters, which a recording must keep."""
        return frozenset(storage for region in regions for storage in self.linted.pop(region).read)

    def mismatch(self, actions: Sequence[Action]) -> str:
        """Return what has changed since the capture: actions, shapes, addresses, or which parameters are trained."""
        captured = self._captured
        if captured is None:
            return "nothing is captured"
        return self._mismatch or captured.facts.changed(actions)

    def replay(self, region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Replay ``region``, or run it eagerly if its inputs have another shape, which leads to another capture."""
        captured = self._captured
        assert captured is not None  # replays happen between capture and invalidate only
        if not self._fits(captured, region, microbatch, tensors):
            return call(region, tensors, partial(self._position, microbatch))
        recorded = captured.recorded.regions[region, captured.recorded.copies[region.chunk, microbatch.index]]
        hooks = Hooks(
            partial(captured.guard.check, Event("F", region, microbatch.index), microbatch.step),
            partial(self._before_backward, region, microbatch),
            partial(self.context.gradients.arrived, recorded.arrivals),
        )
        return recorded.replay(hooks, tensors)

    def _before_backward(self, region: Region, microbatch: Microbatch) -> None:
        assert self._captured is not None  # as in replay
        self._captured.guard.check(Event("B", region, microbatch.index), microbatch.step)
        if region.drawing.recompute:
            # Only the recomputation within draws, so it draws again what the forward drew.
            self._position(microbatch, region.drawing)

    def _position(self, microbatch: Microbatch, segment: Segment) -> None:
        self.context.rng.position(microbatch, segment.layer, segment.index)

    def invalidate(self, reason: str) -> None:
        """Free the graphs and their memory. Raises :class:`GraphCaptureError` with ``strict``."""
        if self._options.strict:
            raise GraphCaptureError(
                f"what was captured no longer fits: {reason}",
                fix="leave graph-capture.strict out to capture again, at the cost of a pause",
            )
        self.context.log.warning("graphs will be captured again: %s", reason)
        self._captured, self._mismatch = None, ""
        self._eager.clear()

    def _events(self, regions: Sequence[Region], actions: Sequence[Action], recorded: Recorded) -> Iterator[Event]:
        """Yield every replay of a step in order."""
        of_chunk = by_chunk(regions, len(self.chunks))
        for kind, chunk, microbatch in passes(actions, len(self.chunks)):
            copy = recorded.copies[chunk, microbatch]
            if kind == "F":
                yield from (Event("F", region, microbatch) for region in of_chunk[chunk])
            elif kind == "B":
                backward = (r for r in reversed(of_chunk[chunk]) if recorded.regions[r, copy].has_backward)
                yield from (Event("B", region, microbatch) for region in backward)

    def _fits(self, captured: _Captured, region: Region, microbatch: Microbatch, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors`` match the captured ones. From the first mismatch on, the pair's chunk runs eagerly."""
        pair = (microbatch.step, region.chunk, microbatch.index)
        if pair not in self._eager:
            fault = _difference(captured.examples[region], tensors)
            if not fault:
                return True
            self._mismatch = f"{region} was given {fault}"
            if self._options.strict:
                self.invalidate(self._mismatch)
            # The rest of this chunk and microbatch must be eager too: its backward belongs to the eager graph.
            self._eager = {other for other in self._eager if other[0] == microbatch.step} | {pair}
        captured.guard.leave_out([Event(kind, region, microbatch.index) for kind in "FB"], microbatch.step)
        return False


def _difference(examples: Sequence[Tensor], tensors: Sequence[Tensor]) -> str:
    """Return how the first of ``tensors`` differs from its example, or an empty text if none does."""
    for example, tensor in zip(examples, tensors, strict=True):
        if (example.shape, example.dtype) != (tensor.shape, tensor.dtype):
            return f"{tuple(tensor.shape)} {tensor.dtype} and was captured with {tuple(example.shape)} {example.dtype}"
        if example.requires_grad != tensor.requires_grad and torch.is_grad_enabled():
            return f"a tensor with requires_grad={tensor.requires_grad}, unlike the captured one"
    return ""


def check_capture(
    plugin: str,
    config: Config,
    options: CaptureOptions,
    *,
    recomputes: bool = False,
    default: Sequence[str] = (),
    whole_step: bool = False,
) -> Iterator[str]:
    """Check the configuration for a plugin called ``plugin``, as its ``check_config``.

    ``recomputes``: its graphs recompute segments, or its replays may run again in the backward. ``default`` is the
    scope that it has when ``options`` has none. ``whole_step``: it captures whole steps where the scope names them.

    Yields a notice if nothing would be captured. Raises :class:`InputError` for a capture that would never be replayed,
    or that would certainly fail with ``strict``.
    """
    scope = default if options.scope is None else options.scope
    if STEP in scope:
        _check_whole_step(plugin, config, scope, captures=whole_step)
    twice = next((name for name in scope if scope.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"graph-capture.scope names {twice} twice", fix="write each name once")
    if options.strict and config.train.ramp_up is not None:
        raise InputError(
            "graph-capture.strict=true with train.ramp_up",
            why="the number of microbatches changes on the way, and each change needs another capture",
            fix="leave one of them out",
        )
    both = [name for name in scope if config.train.recomputes(name)]
    if both and not recomputes:
        raise _in_both(plugin, "recompute", config.train.recompute, both, "its graphs do not recompute")
    if both := [name for name in scope if config.train.offloads(name)]:
        raise _in_both(plugin, "offload", config.train.offload, both, "what a graph saves stays in its memory")
    yield from _check_length(config, options)


def _check_whole_step(plugin: str, config: Config, scope: Sequence[str], *, captures: bool) -> None:
    """Raise :class:`InputError` for a configuration whose steps cannot be captured whole."""
    if not captures:
        raise InputError(
            f"graph-capture={plugin} captures no whole steps",
            fix=f"choose --plugin graph-capture=partial,scope={STEP}, or name segments",
        )
    others = [name for name in scope if name != STEP]
    if others:
        raise InputError(
            f"graph-capture.scope names step, which holds everything, and {', '.join(others)}",
            fix="leave the others out",
        )
    check_step(config.parallel.pipeline, config.train.offload)


def _in_both(plugin: str, key: str, value: SegmentNames, names: Sequence[str], why: str) -> InputError:
    """The refusal of ``names``, which are captured and in ``train.<key>``, which has ``value``."""
    these = ", ".join(names)
    return InputError(
        f"graph-capture={plugin} with train.{key}={typed(value)} captures {these}",
        why=why,
        fix=f"leave {these} out of graph-capture.scope, or name other segments in train.{key}",
    )


def _check_length(config: Config, options: CaptureOptions) -> Iterator[str]:
    """Yield a notice for a run that ends before anything is captured; with ``strict`` raise :class:`InputError`."""
    steps, eager = total_steps(config.train), options.capture_after
    if eager < steps:
        return
    what = f"graph-capture.capture_after={eager} captures nothing"
    why = f"the run ends after {plural(steps, 'step')}, and all of them run eagerly"
    fix = f"set it below {steps}" if steps > 1 else "take more steps"
    if options.strict:
        raise InputError(what, why=why, fix=f"{fix}, or leave graph-capture.strict out")
    yield f"{what}: {why}; {fix}"
