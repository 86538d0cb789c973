"""The verified plans of the installed schedules, third-party ones included, each asked for once.

A schedule is named with its options, ``zero-bubble variant=v``: those in which it says that it wants another shape are
schedules of their own here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from megatron_run.config.values import core_scalar
from megatron_run.contracts.plugin import PluginInfo
from megatron_run.contracts.schema import ParallelSection
from megatron_run.errors import InputError, PluginError
from megatron_run.pipeline.plan import Plan
from megatron_run.planning.plans import plan_run
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run.registry.loaded_plugin import Plugin

#: The most actions of a plan: more take minutes to prove and to simulate.
LARGEST = 100_000


class Schedules:
    """Loads schedules by name, and keeps the plans that were made."""

    def __init__(self) -> None:
        self.catalog = scan()
        self._loaded: dict[str, Plugin] = {}
        self._plans: dict[tuple[object, ...], Plan] = {}

    def names(self) -> list[str]:
        """The schedules that can be loaded; one that cannot is left out, as `plugins list` says why."""
        found = set()
        for entry in self.catalog.of_kind("schedule"):
            try:
                info = self.info(entry.name)
            except PluginError:
                continue
            found |= {entry.name, *(f"{entry.name} {condition}" for condition in info.suggests_with)}
        return sorted(found)

    def info(self, name: str) -> PluginInfo:
        """The schedule's description of itself. Raises :class:`PluginError` when it cannot be loaded."""
        return self._plugin(name).info

    def serving(self, chunks: int) -> list[str]:
        """The schedules that serve several stages and so many chunks each."""
        wanted = {"parallel.pipeline", *(["parallel.chunks"] if chunks > 1 else [])}
        return [name for name in self.names() if wanted <= self.info(name).provides]

    def plan(
        self, name: str, layers: int, stages: int, chunks: int, microbatches: int, counts: Sequence[int] = ()
    ) -> Plan:
        """The plan of one step; without ``counts``, layers that do not divide leave the first places one more.

        Raises :class:`~megatron_run.errors.InputError` when the schedule refuses the shape, or it is too large.
        """
        actions = 2 * stages * chunks * microbatches
        if actions > LARGEST:
            raise InputError(
                f"a step of {microbatches} microbatches has {actions} actions",
                why=f"at most {LARGEST} are planned here",
                fix="take a smaller global batch, or larger microbatches",
            )
        counts = tuple(counts or spread(layers, stages * chunks))
        key = (name, layers, stages, chunks, microbatches, counts)
        if key not in self._plans:
            parallel = ParallelSection(pipeline=stages, chunks=chunks, layers=counts if len({*counts}) > 1 else ())
            self._plans[key] = plan_run(self._plugin(name), layers, parallel, (microbatches,))[1][microbatches]
        return self._plans[key]

    def _plugin(self, name: str) -> Plugin:
        if name not in self._loaded:
            origin = "the planner"
            reference, options = named(name)
            plugin = load(choose(self.catalog, "schedule", reference, origin), origin)
            try:
                self._loaded[name] = plugin.with_options(plugin.options_model.model_validate(options))
            except ValidationError as error:
                raise PluginError(f"{plugin} takes no {name}", why=error.errors()[0]["msg"], origin=origin) from None
        return self._loaded[name]


def named(name: str) -> tuple[str, Mapping[str, Any]]:
    """The word that chooses a schedule, and its options."""
    match = re.fullmatch(r"(.*?)((?: \w+=\S+)*)", name)
    assert match is not None, "the options may be empty"
    pairs = (pair.split("=", 1) for pair in match[2].split())
    return match[1], {key: core_scalar(value) for key, value in pairs}


def spread(layers: int, places: int) -> Sequence[int]:
    """``layers`` over ``places``, as even as they go."""
    each, more = divmod(layers, places)
    return (each + 1,) * more + (each,) * (places - more)
