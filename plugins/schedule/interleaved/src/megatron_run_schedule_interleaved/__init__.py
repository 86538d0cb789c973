"""Interleaved 1F1B: each stage holds V chunks of the model, which makes the bubble V times smaller.

The schedule of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(2021), section 2.2. P stages, p the stage, V chunks a stage, M microbatches, G the size of a microbatch group.

The forwards follow a table: for each group of G microbatches, for each chunk, each microbatch of the group. The
backwards follow the same table with chunk ``V-1-c`` for ``c``. Each stage then runs

- warm-up: ``min(2*(P-p-1) + (V-1)*G, M*V)`` forwards;
- steady: one forward, one backward, until no forward is left;
- cool-down: the remaining backwards.

At most ``min(warm-up + 1, M*V)`` chunk-microbatches are in flight, and the bubble is ``(P-1)/(V*M)`` of the ideal time.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from megatron_run.contracts import Action, PluginInfo, Schedule, ScheduleSpec
from megatron_run.errors import ScheduleError
from megatron_run.errors.wording import plural
from megatron_run.hookspecs import hookimpl


class Options(BaseModel):
    """The options in section ``schedule``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group_size: int | None = Field(
        default=None,
        ge=1,
        description="microbatches per chunk before the next chunk's turn; unset: number of stages",
    )


class Interleaved(Schedule):
    """Interleaved 1F1B over at least two stages with at least two chunks each."""

    def __init__(self, group_size: int | None = None) -> None:
        self._group_size = group_size

    def actions(self, spec: ScheduleSpec) -> list[list[Action]]:
        """Warm-up, steady, cool-down for each stage.

        Raises :class:`ScheduleError` for one stage, one chunk, a group smaller than the stages or larger than M, or a
        last group smaller than the stages.
        """
        group = self._group_size or spec.stages
        _check_shape(spec)
        _check_groups(spec, group, chosen=self._group_size is not None)
        table = _table(spec, group)
        forwards = [Action("F", microbatch, chunk) for microbatch, chunk in table]
        backwards = [Action("B", microbatch, spec.chunks - 1 - chunk) for microbatch, chunk in table]
        return [_stage(stage, spec, group, forwards, backwards) for stage in range(spec.stages)]


def _table(spec: ScheduleSpec, group: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order of the forwards; the last group may be smaller."""
    return [
        (microbatch, chunk)
        for first in range(0, spec.microbatches, group)
        for chunk in range(spec.chunks)
        for microbatch in range(first, min(first + group, spec.microbatches))
    ]


def _stage(stage: int, spec: ScheduleSpec, group: int, forwards: list[Action], backwards: list[Action]) -> list[Action]:
    warmup = min(2 * (spec.stages - stage - 1) + (spec.chunks - 1) * group, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]


def _check_shape(spec: ScheduleSpec) -> None:
    for key, value in (("parallel.pipeline", spec.stages), ("parallel.chunks", spec.chunks)):
        if value < 2:
            raise ScheduleError(
                f"interleaved needs {key} of at least 2, got {value}",
                why="it interleaves the chunks of several stages",
                fix=f"choose --plugin schedule=1f1b, or set {key}=2",
            )


def _check_groups(spec: ScheduleSpec, group: int, *, chosen: bool) -> None:
    if group < spec.stages:
        raise ScheduleError(
            f"schedule.group_size={group} is smaller than the {spec.stages} pipeline stages",
            fix=f"set schedule.group_size to {spec.stages} or more, or leave it out",
        )
    if not _fits(spec.microbatches, spec.stages, group):
        remainder = spec.microbatches % group
        raise ScheduleError(
            f"interleaved cannot run {plural(spec.microbatches, 'microbatch')} in groups of {group}"
            f"{' (schedule.group_size)' if chosen else ''} over {spec.stages} stages",
            why=f"the last group would have {plural(remainder, 'microbatch')}, fewer than the stages"
            if spec.microbatches > group
            else "there must be at least one whole group",
            fix=f"change train.global_batch_size so that there are {_nearest(spec.microbatches, spec.stages, group)} "
            "microbatches",
        )


def _fits(microbatches: int, stages: int, group: int) -> bool:
    """Whether there is a whole group, and the last group is empty or has at least one microbatch per stage."""
    remainder = microbatches % group
    return microbatches >= group and (remainder == 0 or remainder >= stages)


def _nearest(microbatches: int, stages: int, group: int) -> str:
    """The nearest numbers of microbatches below and above that fit, where ``microbatches`` does not: ``"4 or 8"``."""
    if microbatches < group:
        return str(group)
    whole = microbatches - microbatches % group
    return f"{whole} or {whole + stages}"


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Serves stages and chunks; suggests two of each."""
    return PluginInfo(
        "schedule",
        "interleaved",
        options=Options,
        provides=frozenset({"parallel.pipeline", "parallel.chunks"}),
        suggests={"parallel.pipeline": 2, "parallel.chunks": 2},
    )


@hookimpl
def megatron_run_create_schedule(options: Options) -> Schedule:
    """Make the schedule with the chosen group size."""
    return Interleaved(options.group_size)
