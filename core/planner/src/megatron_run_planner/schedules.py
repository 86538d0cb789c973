"""The verified plans of the installed schedules, third-party ones included, each asked for once."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_run.contracts.plugin import PluginInfo
from megatron_run.contracts.schema import ParallelSection
from megatron_run.errors import PluginError
from megatron_run.pipeline.plan import Plan
from megatron_run.planning.plans import plan_run
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import Catalog, scan
from megatron_run.registry.load import load
from megatron_run.registry.loaded_plugin import Plugin


class Schedules:
    """Loads schedules by name, and keeps the plans that were made."""

    def __init__(self, catalog: Catalog | None = None) -> None:
        self._catalog = catalog or scan()
        self._loaded: dict[str, Plugin] = {}
        self._plans: dict[tuple[str, int, int, int, int], Plan] = {}

    def names(self) -> list[str]:
        """The schedules that can be loaded; one that cannot is left out, as `plugins list` says why."""
        found = []
        for entry in self._catalog.of_kind("schedule"):
            try:
                self.info(entry.name)
            except PluginError:
                continue
            found.append(entry.name)
        return sorted(set(found))

    def info(self, name: str) -> PluginInfo:
        """What the schedule says of itself. Raises :class:`PluginError` when it cannot be loaded."""
        return self._plugin(name).info

    def plan(self, name: str, layers: int, stages: int, chunks: int, microbatches: int) -> Plan:
        """The plan of one step; layers that do not divide are dealt out, the first places holding one more.

        Raises :class:`~megatron_run.errors.InputError` when the schedule refuses the shape.
        """
        key = (name, layers, stages, chunks, microbatches)
        if key not in self._plans:
            counts = spread(layers, stages * chunks)
            parallel = ParallelSection(pipeline=stages, chunks=chunks, layers=counts if len({*counts}) > 1 else ())
            self._plans[key] = plan_run(self._plugin(name), layers, parallel, (microbatches,))[1][microbatches]
        return self._plans[key]

    def _plugin(self, name: str) -> Plugin:
        if name not in self._loaded:
            origin = "asked by the planner"
            self._loaded[name] = load(choose(self._catalog, "schedule", name, origin), origin)
        return self._loaded[name]


def spread(layers: int, places: int) -> Sequence[int]:
    """``layers`` over ``places``, as even as they go."""
    each, more = divmod(layers, places)
    return (each + 1,) * more + (each,) * (places - more)
