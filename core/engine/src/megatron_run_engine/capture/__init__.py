"""What plugins that capture graphs share: regions from segments, the order of passes, slots, and the rules of capture.

A graph records work at fixed addresses. What follows from that does not depend on who records: which segments may go
together, in which order they must be recorded and replayed, how many sets of inputs are needed, and what a recorded
function must not do.
"""

from megatron_run_engine.capture.lint import kept_streams, lint, run_backward, zeros_like
from megatron_run_engine.capture.order import OrderGuard, Pass, passes
from megatron_run_engine.capture.refusals import check_capture
from megatron_run_engine.capture.region_capture import CaptureOptions, Hooks, Recorded, RecordedRegion, RegionCapture
from megatron_run_engine.capture.regions import by_chunk, call, chained, check_scope, choose_regions
from megatron_run_engine.capture.rules import BrokenRule, Rules, blamed, unwritten, written
from megatron_run_engine.capture.slots import Slots, shared_slots, slots_by_chunk

__all__ = [
    "BrokenRule",
    "CaptureOptions",
    "Hooks",
    "OrderGuard",
    "Pass",
    "Recorded",
    "RecordedRegion",
    "RegionCapture",
    "Rules",
    "Slots",
    "blamed",
    "by_chunk",
    "call",
    "chained",
    "check_capture",
    "check_scope",
    "choose_regions",
    "kept_streams",
    "lint",
    "passes",
    "run_backward",
    "shared_slots",
    "slots_by_chunk",
    "unwritten",
    "written",
    "zeros_like",
]
