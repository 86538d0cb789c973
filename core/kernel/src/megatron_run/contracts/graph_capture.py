"""The contract of kind ``graph-capture``: which segments of a layer are captured and replayed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_run.errors import plural

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.contracts.actions import Action
    from megatron_run.contracts.model import Microbatch, Segment


@dataclass(frozen=True, eq=False)
class Region:
    """Neighbouring segments of one layer that are replayed as one; ``chunk`` is the chunk they belong to.

    ``inputs`` are the names that the region reads from the layer's environment and ``outputs`` those that it leaves
    there; what only its own segments read may be left out. At most one of its segments draws random numbers, since the
    kernel positions the random streams once, before the region. A region is equal to itself alone.
    """

    chunk: int
    segments: tuple[Segment, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{'+'.join(segment.name for segment in self.segments)} of layer {self.segments[0].layer}"

    @property
    def drawing(self) -> Segment:
        """The segment for which the random streams are positioned: the one that draws, else the last."""
        return next((segment for segment in self.segments if segment.draws), self.segments[-1])

    @property
    def differentiable(self) -> bool:
        """Whether it has a backward, by what its segments say."""
        return any(segment.differentiable for segment in self.segments)


@dataclass(frozen=True)
class CaptureSize:
    """How much is captured on one stage, or would be.

    ``graphs`` are forwards and backwards; ``slots`` sets of static inputs, the most microbatches in flight;
    ``static_bytes`` the inputs and gradients that are copied before a replay; ``pool_bytes`` the most that the
    graphs' own memory held at once. Bytes are None where shapes are not known, or nothing was captured yet.
    """

    regions: int
    graphs: int
    slots: int
    static_bytes: int | None = None
    pool_bytes: int | None = None

    def __str__(self) -> str:
        parts = [plural(self.regions, "region"), plural(self.graphs, "graph"), plural(self.slots, "slot")]
        if self.static_bytes is not None:
            parts.append(f"{self.static_bytes / 2**20:,.2f} MiB of static inputs")
        if self.pool_bytes is not None:
            parts.append(f"{self.pool_bytes / 2**20:,.2f} MiB of graph memory")
        return ", ".join(parts)


class GraphCapture(ABC):
    """Replays work recorded once instead of launching it again.

    The kernel asks for ``regions`` once, before training. After ``capture_after`` eager steps, in which it notes what
    each region is given, it hands them to ``capture`` with the stage's actions, and from then on calls ``replay``
    wherever a captured region would run in training; evaluation runs eagerly. Before each later step it asks
    ``mismatch``; where something no longer fits it calls ``invalidate`` and starts again with eager steps. Slots are
    derived from the microbatch's identity and the order of the actions, never from a count of calls. A whole working
    plugin is the built-in none.

    Before a replay the kernel makes the region's parameters ready and positions the two random streams for
    ``region.drawing``: the device's default generator and, for what several ranks drop alike,
    ``context.rng.replicated``. On CUDA that is a generator of its own, of which a graph must be told before it records
    (``torch.cuda.CUDAGraph.register_generator_state``).

    Weight gradients are part of what is captured, whatever the schedule: W finds nothing left to do for a captured
    region. ``context.gradients.recording`` tells whose gradients a capture makes, and after each replay of a backward
    ``context.gradients.arrived`` must be told of them.
    """

    #: Steps that run eagerly before capture, at least 1.
    capture_after: int = 1

    @abstractmethod
    def regions(self, chunks: Sequence[Sequence[Segment]]) -> Sequence[Region]:
        """Choose what to capture among each chunk's segments (in forward order); never across a layer.

        Called also while a run is planned, with every stage in turn and with all of them as one. Raises
        :class:`megatron_run.errors.RunError` where a segment that was asked for may not be captured.
        """

    @abstractmethod
    def plan(self, regions: Sequence[Region], actions: Sequence[Action]) -> CaptureSize:
        """How much ``capture`` would make of ``regions`` in the order of ``actions``, without bytes."""

    @abstractmethod
    def capture(
        self,
        regions: Sequence[Region],
        actions: Sequence[Action],
        examples: Mapping[Region, tuple[Tensor, ...]],
    ) -> CaptureSize:
        """Record ``regions`` in the order of ``actions``.

        ``examples`` are on the meta device: shape, type and ``requires_grad`` of what each region was given. Parameters
        keep their values. What is left in their ``main_grad`` does not matter, so that no copy of it is needed: it is
        between two steps, and each begins with ``Optimizer.zero_grad``. Raises
        :class:`megatron_run.errors.PluginError` and leaves nothing behind.
        """

    @abstractmethod
    def mismatch(self, actions: Sequence[Action]) -> str:
        """Why what is captured cannot serve a step of ``actions``; empty where it can. Ranks need not agree."""

    @abstractmethod
    def replay(self, region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run a captured region on its ``inputs`` and return its ``outputs``; differentiable."""

    @abstractmethod
    def invalidate(self, reason: str) -> None:
        """Forget what was captured; the next steps run eagerly. May refuse with a PluginError that says why."""
