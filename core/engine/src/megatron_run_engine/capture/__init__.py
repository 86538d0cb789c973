"""The parts of graph capture that are common to all backends: regions, the order of passes, slots and rules.

A graph records kernels at fixed addresses. This determines which segments may be captured together, in which order they
are recorded and replayed, how many sets of inputs they need, and what a recorded function must not do.

Imports: config, contracts, errors, planning, runtime.
"""

from megatron_run_engine.capture.fixed_addresses import FixedAddresses
from megatron_run_engine.capture.graphs import Backend, Graph, Place, backend_for, weak_alias
from megatron_run_engine.capture.order import (
    OrderGuard,
    Pass,
    Recordings,
    Slots,
    passes,
    recordings,
    shared_slots,
    slots_by_chunk,
)
from megatron_run_engine.capture.region_capture import (
    CaptureOptions,
    Hooks,
    Recorded,
    RecordedRegion,
    RegionCapture,
    check_capture,
)
from megatron_run_engine.capture.regions import (
    STEP,
    by_chunk,
    call,
    chained,
    check_scope,
    check_step,
    choose_regions,
    every_segment,
)
from megatron_run_engine.capture.rules import (
    BrokenRule,
    Linted,
    Rules,
    blamed,
    kept_streams,
    lint,
    refusing_breaks,
    run_backward,
    unwritten,
    written,
    zeros_like,
)
from megatron_run_engine.capture.step_graph import StepGraph

__all__ = [
    "STEP",
    "Backend",
    "BrokenRule",
    "CaptureOptions",
    "FixedAddresses",
    "Graph",
    "Hooks",
    "Linted",
    "OrderGuard",
    "Pass",
    "Place",
    "Recorded",
    "RecordedRegion",
    "Recordings",
    "RegionCapture",
    "Rules",
    "Slots",
    "StepGraph",
    "backend_for",
    "blamed",
    "by_chunk",
    "call",
    "chained",
    "check_capture",
    "check_scope",
    "check_step",
    "choose_regions",
    "every_segment",
    "kept_streams",
    "lint",
    "passes",
    "recordings",
    "refusing_breaks",
    "run_backward",
    "shared_slots",
    "slots_by_chunk",
    "unwritten",
    "weak_alias",
    "written",
    "zeros_like",
]
