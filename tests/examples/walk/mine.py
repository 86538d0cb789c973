"""V-shaped 1F1B: the model goes down the stages and comes back up, one forward and one backward by turns."""

from __future__ import annotations

from megatron_run.contracts import PluginInfo, Schedule
from megatron_run.contracts.schedule import Action, LayoutSpec, Place, ScheduleSpec, split_layers
from megatron_run.errors import ScheduleError
from megatron_run.hookspecs import hookimpl


class Vee(Schedule):
    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        if spec.chunks != 2:
            raise ScheduleError(f"a V has 2 chunks a stage, got {spec.chunks}", fix="set parallel.chunks=2")
        down = [(stage, 0) for stage in range(spec.stages)]
        up = [(stage, 1) for stage in reversed(range(spec.stages))]
        return tuple(Place(*at, layers) for at, layers in zip(down + up, split_layers(spec), strict=True))

    def actions(self, spec: ScheduleSpec) -> list[list[Action]]:
        last = len(spec.layout) - 1
        timed: list[list[tuple[int, Action]]] = [[] for _ in range(spec.stages)]
        for position, (stage, chunk, _) in enumerate(spec.layout):
            for m in range(spec.microbatches):
                timed[stage].append((6 * m + 3 * position, Action("F", m, chunk)))
                timed[stage].append((6 * m + 3 * (2 * last - position) + 1, Action("B", m, chunk)))
        return [[action for _, action in sorted(stage)] for stage in timed]


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    shape = {"parallel.pipeline": 2, "parallel.chunks": 2}
    return PluginInfo("schedule", "mine", provides=frozenset(shape), suggests=shape)


@hookimpl
def megatron_run_create_schedule() -> Schedule:
    return Vee()
