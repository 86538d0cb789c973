"""Graph capture ``none``: every segment runs eagerly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.contracts import CaptureSize, GraphCapture, PluginInfo
from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from megatron_run.contracts import Microbatch, Region, Segment
    from megatron_run.contracts.schedule import Action


class NoCapture(GraphCapture):
    """Chooses no region, and so never captures or replays one."""

    def regions(self, chunks: Sequence[Sequence[Segment]]) -> Sequence[Region]:
        """Return no region."""
        return ()

    def plan(self, regions: Sequence[Region], actions: Sequence[Action]) -> CaptureSize:
        """Return a size without graphs."""
        return CaptureSize(len(regions), 0, 0)

    def capture(
        self,
        regions: Sequence[Region],
        actions: Sequence[Action],
        examples: Mapping[Region, tuple[Tensor, ...]],
    ) -> CaptureSize:
        """Check that there is nothing to capture."""
        if regions:
            raise ValueError(f"graph-capture none was handed {len(regions)} regions")
        return self.plan(regions, actions)

    def mismatch(self, actions: Sequence[Action]) -> str:
        """Return no mismatch."""
        return ""

    def replay(self, region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Raise ValueError: nothing was captured."""
        raise ValueError(f"{region} was never captured")

    def invalidate(self, reason: str) -> None:
        """No-op: nothing was captured."""


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("graph-capture", "none")


@hookimpl
def megatron_run_create_graph_capture() -> GraphCapture:
    """Make the graph capture."""
    return NoCapture()
