"""GPipe: all forwards, then all backwards.

The schedule of Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019).
P stages, V chunks a stage, M microbatches. Every stage runs

- the forwards: for each chunk, each microbatch;
- the backwards: for each chunk from the last to the first, each microbatch.

All ``M*V`` chunk-microbatches are in flight in between. With ``M >= P`` the bubble is ``(P-1)/(V*M)`` of the ideal
time.
"""

from __future__ import annotations

from megatron_run.contracts import Action, PluginInfo, Schedule, ScheduleSpec
from megatron_run.hookspecs import hookimpl


class GPipe(Schedule):
    """All forwards, then all backwards, over any number of stages and chunks."""

    def actions(self, spec: ScheduleSpec) -> list[list[Action]]:
        """The same list for every stage; every shape is served."""
        chunks, microbatches = range(spec.chunks), range(spec.microbatches)
        forwards = [Action("F", microbatch, chunk) for chunk in chunks for microbatch in microbatches]
        backwards = [Action("B", microbatch, chunk) for chunk in reversed(chunks) for microbatch in microbatches]
        return [forwards + backwards for _ in range(spec.stages)]


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Serves stages and chunks; suggests two stages."""
    return PluginInfo(
        "schedule",
        "gpipe",
        provides=frozenset({"parallel.pipeline", "parallel.chunks"}),
        suggests={"parallel.pipeline": 2},
    )


@hookimpl
def megatron_run_create_schedule() -> Schedule:
    """Make the schedule; it has no options."""
    return GPipe()
