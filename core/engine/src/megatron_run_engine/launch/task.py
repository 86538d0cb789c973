"""What local ranks do instead of a training: the functions of a module, named so that another process finds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_run.config.request import Request
    from megatron_run.contracts.activity import Activity
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.runtime.world import World


@dataclass(frozen=True)
class Task:
    """A task of ``module``, whose functions get ``arguments``, a mapping of JSON's types.

    ``resolve_run(request, arguments)`` returns the run, equal on all ranks; ``work(run, world, activity, arguments)``
    does this rank's part of the task.
    """

    module: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def resolve_run(self, request: Request) -> ResolvedRun:
        """The run, as the module makes it."""
        run: ResolvedRun = import_module(self.module).resolve_run(request, self.arguments)
        return run

    def work(self, run: ResolvedRun, world: World, activity: Activity) -> None:
        """Do this rank's part."""
        import_module(self.module).work(run, world, activity, self.arguments)
