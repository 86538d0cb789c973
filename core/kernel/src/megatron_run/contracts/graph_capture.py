"""The contract of kind ``graph-capture``: capture and replay of segments of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_run.errors.wording import plural

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts.model import Microbatch, Segment
    from megatron_run.contracts.schedule import Action


@dataclass(frozen=True, eq=False)
class Region:
    """Adjacent segments of one layer of ``chunk``, replayed as one.

    ``inputs`` are the names that the region reads from the layer's environment, and ``outputs`` the names that it
    writes there; results that only its own segments read may be omitted. At most one of its segments may draw random
    numbers, since the random streams are positioned once, before the region. Regions compare by identity.
    """

    chunk: int
    segments: tuple[Segment, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{'+'.join(segment.name for segment in self.segments)} of layer {self.segments[0].layer}"

    @property
    def drawing(self) -> Segment:
        """The segment for which the random streams are positioned: the one that draws, or else the last."""
        return next((segment for segment in self.segments if segment.draws), self.segments[-1])

    @property
    def differentiable(self) -> bool:
        """Whether the region has a backward: whether any of its segments does."""
        return any(segment.differentiable for segment in self.segments)


@dataclass(frozen=True)
class CaptureSize:
    """The size of a capture on one stage, planned or made.

    ``graphs`` counts forwards and backwards. ``slots`` is the number of sets of static inputs, equal to the peak number
    of microbatches in flight, and 0 where graphs own no memory. ``static_bytes`` is the size of the inputs and
    gradients that are copied before replays; ``pool_bytes`` is the peak size of the graphs' own memory. Bytes are None
    before the capture, and where shapes are not known.
    """

    regions: int
    graphs: int
    slots: int
    static_bytes: int | None = None
    pool_bytes: int | None = None

    def __str__(self) -> str:
        parts = [plural(self.regions, "region"), plural(self.graphs, "graph")]
        if self.slots:
            parts.append(plural(self.slots, "slot"))
        if self.static_bytes is not None:
            parts.append(f"{self.static_bytes / 2**20:,.2f} MiB of static inputs")
        if self.pool_bytes is not None:
            parts.append(f"{self.pool_bytes / 2**20:,.2f} MiB of graph memory")
        return ", ".join(parts)


class GraphCapture(ABC):
    """Records work once and replays it, instead of launching it again in every step.

    The engine calls these methods, in this order:

    1. ``regions``, once, before training.
    2. ``capture`` with the stage's actions, after ``capture_after`` eager steps in which the engine records the inputs
       of each region.
    3. ``replay`` wherever a captured region would run in training. Evaluation runs eagerly.
    4. ``mismatch`` before each later step. If the capture no longer fits, ``invalidate``; then again from step 2, with
       eager steps first.

    A plugin derives the slot of a replay from the microbatch's identity and the order of the actions, never from a
    count of calls. A whole working plugin is the built-in ``none``.

    Before a replay the engine waits for the region's parameters, and positions both random streams for
    ``region.drawing``: the device's default generator, and ``context.rng.replicated`` for masks that are equal on all
    tensor-parallel ranks. On CUDA the latter is a separate generator, which must be registered with a graph before it
    records (``torch.cuda.CUDAGraph.register_generator_state``).

    A capture includes weight gradients, whatever the schedule: ``W`` has nothing left to do for a captured region.
    ``context.gradients.recording`` lists the parameters whose gradients a capture produces. After each replay of a
    backward, call ``context.gradients.arrived`` with them.

    With ``whole_step`` the engine calls ``capture_step`` and ``replay_step`` in the place of ``capture`` and
    ``replay``: one graph of every forward and backward of a step, without a pipeline. ``regions`` then returns all
    segments, none of which may draw, so that they can be checked and watched. The engine fills the step's inputs before
    a replay, and after it reports losses and arrivals. With ``replays_within`` it calls ``capture`` first, and in the
    step that is recorded ``replay``, as in steps that the graph does not serve.
    """

    #: Number of eager steps before a capture, at least 1.
    capture_after: int = 1
    #: Whether a replay returns the bits of an eager run. If not, it differs by rounding.
    exact: bool = True
    #: Whether a replay may run a second time, in the backward. If so, the engine recomputes captured segments.
    reruns: bool = False
    #: Whether steps are captured whole, instead of regions.
    whole_step: bool = False
    #: Whether a step that is captured whole replays captured regions within.
    replays_within: bool = False
    #: Whether the steps of this run could be captured whole if it were asked for: what a run that waits for launches is
    #: advised.
    captures_steps: bool = False

    @abstractmethod
    def regions(self, chunks: Sequence[Sequence[Segment]]) -> Sequence[Region]:
        """Choose regions among each chunk's segments, given in forward order; a region lies within one layer.

        Also called while a run is planned: for every stage in turn, and for all stages as one. Raises
        :class:`megatron_run.errors.RunError` if the user asked for a segment that may not be captured.
        """

    @abstractmethod
    def plan(self, regions: Sequence[Region], actions: Sequence[Action]) -> CaptureSize:
        """The size of a capture of ``regions`` in the order of ``actions``, without bytes."""

    @abstractmethod
    def capture(
        self,
        regions: Sequence[Region],
        actions: Sequence[Action],
        examples: Mapping[Region, tuple[Tensor, ...]],
    ) -> CaptureSize:
        """Record ``regions`` in the order of ``actions``.

        ``examples`` are tensors on the meta device with the shape, type and ``requires_grad`` of each region's inputs.
        Parameters must keep their values. ``main_grad`` may be overwritten: a capture happens between two steps, and
        each step begins with ``Optimizer.zero_grad``. On failure this raises
        :class:`megatron_run.errors.PluginError`, and leaves nothing captured.
        """

    def capture_step(
        self,
        run: Callable[[], None],
        regions: Sequence[Region],
        actions: Sequence[Action],
        examples: Mapping[Region, tuple[Tensor, ...]],
    ) -> CaptureSize:
        """Record ``run``, which runs a step of ``actions`` on tensors that keep their addresses, and call it once.

        As :meth:`capture` otherwise. ``static_bytes`` is filled in by the engine.
        """
        raise NotImplementedError(f"{type(self).__name__} captures no whole steps")

    def replay_step(self) -> None:
        """Replay the step that :meth:`capture_step` recorded."""
        raise NotImplementedError(f"{type(self).__name__} captures no whole steps")

    @abstractmethod
    def mismatch(self, actions: Sequence[Action]) -> str:
        """The reason why the capture cannot serve a step of ``actions``, empty if it can. Ranks need not agree."""

    @abstractmethod
    def replay(self, region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Replay a captured region on its ``inputs`` and return its ``outputs``, differentiably."""

    @abstractmethod
    def invalidate(self, reason: str) -> None:
        """Discard the capture; the next steps run eagerly. May refuse by a PluginError with the reason."""
