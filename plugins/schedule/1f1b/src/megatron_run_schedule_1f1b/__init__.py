"""1F1B: after a short warm-up every stage alternates one forward with one backward.

The schedule of PipeDream-Flush (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", 2021) and of
Megatron-LM. P stages, M microbatches, p the stage:

- warm-up: ``min(P-p-1, M)`` forwards fill the pipeline;
- steady: one forward, one backward, until no forward is left;
- cool-down: the backwards of the warm-up.

At most ``min(P-p, M)`` microbatches are in flight, and the bubble is ``(P-1)/M`` of the ideal time.
"""

from __future__ import annotations

from megatron_run.contracts import Action, PluginInfo, Schedule, ScheduleSpec
from megatron_run.errors import ScheduleError
from megatron_run.hookspecs import hookimpl


class OneForwardOneBackward(Schedule):
    """1F1B over any number of stages with one chunk each."""

    def actions(self, spec: ScheduleSpec) -> list[list[Action]]:
        """Warm-up, steady, cool-down for each stage; raises :class:`ScheduleError` for several chunks a stage."""
        if spec.chunks > 1:
            raise ScheduleError(
                f"1f1b runs one chunk a stage, got parallel.chunks={spec.chunks}",
                fix="choose --plugin schedule=interleaved, or set parallel.chunks=1",
            )
        return [_stage(stage, spec.stages, spec.microbatches) for stage in range(spec.stages)]


def _stage(stage: int, stages: int, microbatches: int) -> list[Action]:
    forwards = [Action("F", microbatch, 0) for microbatch in range(microbatches)]
    backwards = [Action("B", microbatch, 0) for microbatch in range(microbatches)]
    warmup = min(stages - stage - 1, microbatches)
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + steady + backwards[microbatches - warmup :]


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Serves pipeline stages; suggests two."""
    return PluginInfo(
        "schedule",
        "1f1b",
        provides=frozenset({"parallel.pipeline"}),
        suggests={"parallel.pipeline": 2},
    )


@hookimpl
def megatron_run_create_schedule() -> Schedule:
    """Make the schedule; it has no options."""
    return OneForwardOneBackward()
