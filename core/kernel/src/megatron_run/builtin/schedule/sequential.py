"""The built-in schedule: one stage, one microbatch after the other."""

from __future__ import annotations

from megatron_run.contracts import PluginInfo, Schedule
from megatron_run.contracts.schedule import Action, ScheduleSpec
from megatron_run.errors import ScheduleError
from megatron_run.hookspecs import hookimpl


class Sequential(Schedule):
    """Forward and backward of each microbatch in turn: the order that every other schedule is compared with."""

    def actions(self, spec: ScheduleSpec) -> list[list[Action]]:
        """``F0 B0 F1 B1 ...``; raises :class:`ScheduleError` for more than one stage or chunk."""
        if spec.chunks > 1:
            raise ScheduleError(
                f"sequential runs one chunk, got parallel.chunks={spec.chunks}",
                fix="choose --plugin schedule=interleaved, or set parallel.chunks=1",
            )
        if spec.stages > 1:
            raise ScheduleError(
                f"sequential runs one stage, got parallel.pipeline={spec.stages}",
                fix="choose --plugin schedule=1f1b, or set parallel.pipeline=1",
            )
        return [[action for m in range(spec.microbatches) for action in (Action("F", m, 0), Action("B", m, 0))]]


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """One stage needs no ability."""
    return PluginInfo("schedule", "sequential")


@hookimpl
def megatron_run_create_schedule() -> Schedule:
    """Make the schedule; there is nothing to set."""
    return Sequential()
