"""Zero bubble: weight gradients, for which no stage waits, fill the time in which a stage would be idle.

The schedules of Qi et al., "Zero Bubble Pipeline Parallelism" (2024). A backward is split: ``I`` makes the input
gradient, for which the previous stage waits, and ``W`` the weight gradients at any later time. Two variants:

- ``h1``, in the module of that name, keeps the layout of 1F1B and its memory;
- ``v`` folds the model in two chunks a stage and nearly closes the bubble.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import PluginInfo, Schedule
from megatron_run.hookspecs import hookimpl
from megatron_run_schedule_zero_bubble.h1 import ZeroBubbleH1
from megatron_run_schedule_zero_bubble.v import ZeroBubbleV

__all__ = ["Options", "ZeroBubbleH1", "ZeroBubbleV"]


class Options(BaseModel):
    """The options in section ``schedule``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    variant: Literal["h1", "v"] = Field(
        default="h1", description="h1: one chunk per stage, memory of 1f1b; v: two chunks per stage, smaller bubble"
    )


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Serves stages and chunks; suggests two stages, and two chunks for ``v``."""
    return PluginInfo(
        "schedule",
        "zero-bubble",
        options=Options,
        provides=frozenset({"parallel.pipeline", "parallel.chunks"}),
        suggests={"parallel.pipeline": 2},
        suggests_with={"variant=v": {"parallel.chunks": 2}},
    )


@hookimpl
def megatron_run_create_schedule(options: Options) -> Schedule:
    """Make the chosen variant."""
    return ZeroBubbleV() if options.variant == "v" else ZeroBubbleH1()
