"""The contract of kind ``schedule``: where layers live and in which order microbatches run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from megatron_run.contracts.actions import Action, LayoutSpec, Place, ScheduleSpec, looped_layout


class Schedule(ABC):
    """Two pure functions; everything else is derived by the kernel.

    Messages, gradient-sync points, memory in flight, the bubble, the timeline and the proof that nothing deadlocks and
    that every send meets its receive follow from the action lists. Refuse a shape you cannot serve with
    :class:`megatron_run.errors.ScheduleError`, naming the nearest one you can: the user then reads it as a mistake of
    the configuration (exit code 2), while lists that are no legal plan are a mistake of the plugin (exit code 3).

    A whole working plugin, all forwards and then all backwards::

        class AllForwardAllBackward(Schedule):
            def actions(self, spec):
                forwards = [Action("F", m, 0) for m in range(spec.microbatches)]
                backwards = [Action("B", m, 0) for m in range(spec.microbatches)]
                return [forwards + backwards for _ in range(spec.stages)]

        @hookimpl
        def megatron_run_plugin_info():
            return PluginInfo("schedule", "mine", provides=frozenset({"parallel.pipeline"}))

        @hookimpl
        def megatron_run_create_schedule(options):
            return AllForwardAllBackward()
    """

    def layout(self, spec: LayoutSpec) -> tuple[Place, ...]:
        """Where each layer lives, in model order: the first place has the embedding, the last the loss.

        The default is Megatron's looped layout. The stage and chunk of a place follow from the stages and chunks alone;
        only how many layers a place holds depends on the layers, and on the counts where the user gave some. Nothing
        depends on the number of microbatches, and a place's layers may be empty.
        """
        return looped_layout(spec)

    @abstractmethod
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        """One list of actions per stage, in the order in which the stage runs them.

        For each (microbatch, chunk) of the stage: F, then either B, or I before W. ``S`` may start a chunk's gradient
        sync and ``R`` recompute early.
        """
