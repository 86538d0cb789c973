"""ZB-H1: 1F1B with weight gradients deferred to the times at which a stage would wait.

P stages, M microbatches, p the stage, every operation one unit long:

- warm-up: ``min(P-p-1, M)`` forwards fill the pipeline;
- steady: one forward, one input gradient, and from input gradient ``p`` on one weight gradient, ``p`` behind;
- cool-down: the same without forwards, then the last ``min(p, M)`` weight gradients, when 1F1B would wait.

Between forward and input gradient a stage holds at most ``min(P-p, M)`` microbatches, as in 1F1B, and at most
``min(p+1, M)`` weight gradients are pending. Counted until their weight gradient, at most ``min(P, M)`` are held by any
stage: the memory of 1F1B's first. The bubble is ``(P-1)/(3M)`` of the ideal time where ``M >= P``, a third of 1F1B's.
"""

from __future__ import annotations

from megatron_run.contracts import Schedule
from megatron_run.contracts.schedule import Action, LayoutSpec, Place, ScheduleSpec, looped_layout
from megatron_run.errors import ScheduleError


class ZeroBubbleH1(Schedule):
    """ZB-H1 over any number of stages with one chunk each."""

    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        """Contiguous layers; raises :class:`ScheduleError` for several chunks a stage."""
        _check_chunks(spec.chunks)
        return looped_layout(spec)

    def actions(self, spec: ScheduleSpec) -> list[list[Action]]:
        """Warm-up, steady, cool-down for each stage; raises :class:`ScheduleError` for several chunks a stage."""
        _check_chunks(spec.chunks)
        return [_stage(stage, spec.stages, spec.microbatches) for stage in range(spec.stages)]


def _stage(stage: int, stages: int, microbatches: int) -> list[Action]:
    forwards = [Action("F", microbatch, 0) for microbatch in range(microbatches)]
    weights = [Action("W", microbatch, 0) for microbatch in range(microbatches)]
    warmup = min(stages - stage - 1, microbatches)
    actions = forwards[:warmup]
    for microbatch in range(microbatches):  # steady; in the cool-down the slice of forwards is empty
        actions += forwards[warmup + microbatch : warmup + microbatch + 1]
        actions.append(Action("I", microbatch, 0))
        if microbatch >= stage:
            actions.append(weights[microbatch - stage])
    return actions + weights[max(microbatches - stage, 0) :]


def _check_chunks(chunks: int) -> None:
    if chunks > 1:
        raise ScheduleError(
            f"zero-bubble variant h1 runs one chunk a stage, got parallel.chunks={chunks}",
            fix="set parallel.chunks=1, or choose schedule.variant=v with parallel.chunks=2",
        )
