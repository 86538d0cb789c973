"""The contract of kind ``graph-capture``: which segments of a layer are captured and replayed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_run.actions import Action
    from megatron_run.contracts.model import Microbatch, Segment


@dataclass(frozen=True)
class Region:
    """Neighbouring segments of one layer that are replayed as one; ``chunk`` is the chunk they belong to."""

    chunk: int
    segments: tuple[Segment, ...]


class GraphCapture(ABC):
    """Replays work recorded once instead of launching it again.

    After ``capture_after`` steps the kernel asks for ``regions``, hands them to ``capture`` with the stage's actions,
    and from then on calls ``replay`` wherever a captured region would run. Slots are derived from the microbatch's
    identity and the order of the actions, never from a count of calls. A whole working plugin is the built-in none.

    A segment draws from two random streams, which the kernel positions before each replay: the device's default
    generator and, for what several ranks drop alike, ``context.rng.replicated``. On CUDA that is a generator of its
    own, of which a graph must be told before it records (``torch.cuda.CUDAGraph.register_generator_state``).
    """

    #: Steps that run eagerly before capture.
    capture_after: int = 1

    @abstractmethod
    def regions(self, chunks: Sequence[Sequence[Segment]]) -> Sequence[Region]:
        """Choose what to capture among each chunk's segments (in forward order); never across a layer."""

    @abstractmethod
    def capture(self, regions: Sequence[Region], actions: Sequence[Action]) -> None:
        """Record ``regions`` in the order of ``actions``. Raises :class:`PluginError` and leaves nothing behind."""

    @abstractmethod
    def replay(self, region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run a captured region on the inputs of its first segment's environment; differentiable."""

    @abstractmethod
    def invalidate(self, reason: str) -> None:
        """Forget what was captured; the next steps run eagerly."""
