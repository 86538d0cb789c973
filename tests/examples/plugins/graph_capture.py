"""Takes every segment that may be captured, and replays it by calling it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from megatron_run.contracts import Action, CaptureSize, GraphCapture, Microbatch, PluginInfo, Region, Segment
from megatron_run.hookspecs import hookimpl


class CallAgain(GraphCapture):
    capture_after = 1

    def __init__(self) -> None:
        self._captured: set[Region] = set()

    def regions(self, chunks: Sequence[Sequence[Segment]]) -> Sequence[Region]:
        segments = ((index, segment) for index, chunk in enumerate(chunks) for segment in chunk)
        return [Region(i, (each,), each.inputs, each.outputs) for i, each in segments if not each.why_eager]

    def plan(self, regions: Sequence[Region], actions: Sequence[Action]) -> CaptureSize:
        return CaptureSize(len(regions), graphs=0, slots=0)

    def capture(
        self, regions: Sequence[Region], actions: Sequence[Action], examples: Mapping[Region, tuple[Tensor, ...]]
    ) -> CaptureSize:
        self._captured = set(regions)
        return self.plan(regions, actions)

    def mismatch(self, actions: Sequence[Action]) -> str:
        return ""

    def replay(self, region: Region, microbatch: Microbatch, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert region in self._captured
        outputs = region.segments[0].fn(*tensors)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def invalidate(self, reason: str) -> None:
        self._captured.clear()


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("graph-capture", "call-again")


@hookimpl
def megatron_run_create_graph_capture() -> GraphCapture:
    return CallAgain()
