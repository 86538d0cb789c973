"""All forwards, then all backwards (GPipe, Huang et al. 2019)."""

from __future__ import annotations

from megatron_run.contracts import Action, PluginInfo, Schedule, ScheduleSpec
from megatron_run.errors import ScheduleError
from megatron_run.hookspecs import hookimpl


class AllForwardAllBackward(Schedule):
    def actions(self, spec: ScheduleSpec) -> list[list[Action]]:
        if spec.chunks > 1:
            raise ScheduleError(f"got {spec.chunks} chunks a stage", fix="set parallel.chunks=1")
        forwards = [Action("F", microbatch, 0) for microbatch in range(spec.microbatches)]
        backwards = [Action("B", microbatch, 0) for microbatch in range(spec.microbatches)]
        return [forwards + backwards for _ in range(spec.stages)]


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("schedule", "all-forward-all-backward", provides=frozenset({"parallel.pipeline"}))


@hookimpl
def megatron_run_create_schedule() -> Schedule:
    return AllForwardAllBackward()
