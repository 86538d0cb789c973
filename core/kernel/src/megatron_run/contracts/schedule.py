"""The contract of kind ``schedule``: the places of layers, and the order in which microbatches run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from megatron_run.contracts.actions import Action, LayoutSpec, Place, ScheduleSpec, looped_layout


class Schedule(ABC):
    """A pipeline schedule: two pure functions, from which the kernel derives everything else.

    From the action lists follow the messages, the gradient-sync points, the activations in flight, the bubble, the
    timeline, and the proof that nothing deadlocks and every send meets its receive. A schedule runs no code during
    training and needs no torch.

    For a shape that the schedule cannot serve, raise :class:`megatron_run.errors.ScheduleError` and name the nearest
    one that it can. The user then sees a mistake in the configuration (exit code 2). Lists that are not a legal plan
    are a mistake of the plugin (exit code 3).

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
        """The place of each layer, in model order; the first place has the embedding, the last has the loss.

        The default is the looped layout of Megatron-LM. The stage and chunk of a place must follow from
        ``spec.stages`` and ``spec.chunks`` alone. The layers of a place may also depend on ``spec.layers`` and on the
        user's ``spec.counts``, and may be empty. Nothing depends on the number of microbatches.
        """
        return looped_layout(spec)

    @abstractmethod
    def actions(self, spec: ScheduleSpec) -> Sequence[Sequence[Action]]:
        """One list of actions per stage, in the order in which the stage runs them.

        For each (microbatch, chunk) of the stage: ``F``, then either ``B``, or ``I`` and later ``W``. Optionally ``S``
        starts a chunk's gradient sync, and ``R`` recomputes a forward before its backward.
        """
