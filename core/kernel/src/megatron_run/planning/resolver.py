"""Resolves a request, in order: sources, plugins, suggestions, options, sections, topology, compatibility, plans.

One pass finds all errors and raises them as one :class:`~megatron_run.errors.Problems`; a part is skipped only when
its inputs are wrong. Before it, and before any plugin is imported, each value of the kernel's sections is checked by
itself: a misspelt key is known without torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, TypeVar

from megatron_run.config.faults import VARIABLE, read_faults
from megatron_run.config.merge import ConfigSource
from megatron_run.config.origin import Key, Origin, section_of
from megatron_run.config.request import Request
from megatron_run.config.run_home import home_notices
from megatron_run.config.sources import read_sources
from megatron_run.config.validate import validate_section
from megatron_run.config.values import plain
from megatron_run.contracts.plugin import RUN_KINDS
from megatron_run.contracts.schedule import Place
from megatron_run.contracts.schema import (
    SECTIONS,
    CheckpointSection,
    Config,
    EvalSection,
    GuardSection,
    Header,
    ParallelSection,
    RunSection,
    Section,
    TrainSection,
)
from megatron_run.contracts.topology import Sizes
from megatron_run.errors import Findings, RunError
from megatron_run.pipeline.plan import Plan
from megatron_run.planning.choosing import (
    check_names,
    choose_plugins,
    kind_section,
    rule_notices,
    with_options,
)
from megatron_run.planning.elastic import check_excluding, choice_notice, most_ranks, strengths
from megatron_run.planning.plans import check_rates, layers_of, microbatch_counts, plan_run
from megatron_run.planning.rank_grid import (
    ExpertSplit,
    attribute,
    copy_ranks,
    experts_of,
    idle_keys,
    infer_sizes,
    source_of_data,
)
from megatron_run.planning.run import ResolvedRun
from megatron_run.planning.taken import take
from megatron_run.registry.compatibility import mismatches, misstacked, unserved
from megatron_run.registry.discover import Catalog, scan
from megatron_run.registry.known import known_plugin
from megatron_run.registry.loaded_plugin import Plugin

Part = TypeVar("Part")
AnySection = TypeVar("AnySection", bound=Section)
Plugins = Mapping[str, tuple[Plugin, ...]]

#: Keys that mean something only when a chosen plugin serves them.
_SERVED = ("tensor", "context", "pipeline", "chunks", "expert", "sequence")


def load_config(
    *configs: str | PurePath | Mapping[str, Any],
    sets: Mapping[str, Any] | Iterable[str] = (),
    plugins: Iterable[object] = (),
    nproc: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> ResolvedRun:
    """Resolve a run from Python, as the command does.

    ``configs`` are paths, ``preset:NAME`` or mappings, merged left to right; none is ``preset:laptop``. ``sets`` maps
    dotted keys to values, or lists ``KEY=VALUE``; ``plugins`` are ``KIND=NAME[,OPT=VAL...]`` or plugin objects;
    ``nproc`` is the number of ranks; ``environment`` defaults to the process's. Raises
    :class:`~megatron_run.errors.Problems`.
    """
    chosen = tuple(plugins)
    values = plain(sets) if isinstance(sets, Mapping) else {}
    request = Request(
        configs=tuple(plain(config) for config in configs),
        sets=() if isinstance(sets, Mapping) else tuple(sets),
        plugins=tuple(plugin for plugin in chosen if isinstance(plugin, str)),
        nproc=nproc,
        environment=os.environ if environment is None else environment,
        values=values,
    )
    return resolve(request, [plugin for plugin in chosen if not isinstance(plugin, str)])


def resolve(request: Request, objects: Sequence[object] = (), *, plan_only: bool = False) -> ResolvedRun:
    """The run that ``request`` asks for; ``objects`` are plugins handed in from Python.

    With ``plan_only`` plugins that need the engine, where there is none, are planned with by their names and options as
    written; such a run cannot be trained.

    Raises :class:`~megatron_run.errors.Problems` with everything that is wrong. Imports the chosen plugins only.
    """
    return _Resolver(request, tuple(objects), plan_only).run()


def check_keys(request: Request) -> None:
    """Raise what is wrong with the keys and names of ``request``, as far as that is known before plugins are imported.

    For commands that do something expensive before they can resolve a run.
    """
    _Resolver(request, (), plan_only=True).read(scan())


def run_setting(request: Request, name: str) -> str:
    """``run.NAME`` of ``request``, or its default, before any plugin is imported; no plugin is asked."""
    value = read_sources(request, Findings(), []).values.get(("run", name))
    return str(RunSection.model_fields[name].default if value is None else value.data)


def as_typed(run: ResolvedRun) -> ResolvedRun:
    """``run`` as it was asked for, on whichever ranks ``run.elastic`` has found place: what a later start begins with.

    Where nothing but the world says how many ranks are wanted, ``parallel.data`` is unset again.
    """
    request = run.request
    if run.config.run.elastic == "off" or request.there is None:
        return run
    request = replace(request, there=None, planned={})
    try:
        typed = resolve(request)
    except RunError:  # it was asked for more than its number of ranks lets anybody plan
        return run
    data = read_sources(request, Findings(), []).values.get(("parallel", "data"))
    parallel = typed.config.parallel
    if request.nproc is None and (data is None or data.data is None):
        parallel = parallel.model_copy(update={"data": None})
    update = {"parallel": parallel, "run": run.config.run}  # whose folder a launcher has set since
    return replace(typed, config=typed.config.model_copy(update=update))


class _Resolver:
    """Resolves one request, collecting errors and notices."""

    def __init__(self, request: Request, objects: tuple[object, ...], plan_only: bool) -> None:
        self._request, self._objects, self._plan_only = request, objects, plan_only
        self._findings = Findings()
        self._notices: list[str] = []
        self._latest: dict[str, str] = {}
        #: The ranks of the world, where they are given and ``run.elastic`` chooses none; those by ``parallel.data``.
        self._nproc, self._wanted = request.nproc, 0

    def run(self) -> ResolvedRun:
        catalog = scan()
        merged, plugins = self._choose(catalog)
        header = self._section(Header, "", merged)
        run = self._section(RunSection, "run", merged)
        train = self._section(TrainSection, "train", merged)
        parallel = self._section(ParallelSection, "parallel", merged)
        evaluation = self._section(EvalSection, "eval", merged)
        checkpoint = self._section(CheckpointSection, "checkpoint", merged)
        guard = self._section(GuardSection, "guard", merged)
        if run is not None and guard is not None:
            with self._findings.collect():
                check_excluding(run, guard)
        sizes, layout, plans = self._split(self._strengths(run, parallel, train), train, plugins, catalog)
        origins = _origins(merged)
        self._settle(origins)  # here, since a plugin is only asked about a configuration without known faults
        config = Config(
            version=_sure(header).version,
            run=_sure(run),
            train=_sure(train),
            parallel=_sure(parallel).model_copy(update={"data": _sure(sizes).data}),
            eval=_sure(evaluation),
            checkpoint=_sure(checkpoint),
            guard=_sure(guard),
            **{section_of(kind): kind_section(kind, stack, merged) for kind, stack in plugins.items()},
        )
        self._ask_plugins(plugins, config, origins)
        resolved = ResolvedRun(
            config=config,
            plugins=MappingProxyType(plugins),
            sizes=_sure(sizes),
            layout=layout,
            plans=MappingProxyType(plans),
            origins=MappingProxyType(origins),
            notices=tuple(dict.fromkeys(self._notices)),
            request=replace(self._request, latest=self._latest),
        )
        chosen = choice_notice(resolved, self._wanted)
        return replace(resolved, notices=(*resolved.notices, chosen)) if chosen else resolved

    def _choose(self, catalog: Catalog) -> tuple[ConfigSource, dict[str, tuple[Plugin, ...]]]:
        """All sources as one, the plugins' suggestions among them, and the plugins with their options."""
        merged = self.read(catalog)
        merged, plugins = take(
            merged,
            catalog,
            self._findings,
            self._notices,
            self._objects,
            plan_only=self._plan_only,
            latest=self._latest,
        )
        self._notices += (*rule_notices(merged), *home_notices(merged, self._request))
        unloaded = [plugin for stack in plugins.values() for plugin in stack if not plugin.loaded]
        files = [str(plugin) for plugin in unloaded if plugin.entry is not None and plugin.entry.file]
        if files:
            self._notices.append(f"{', '.join(files)} is a file, and no file is run here: options are not checked")
        if lacking := [str(plugin) for plugin in unloaded if str(plugin) not in files]:
            self._notices.append(f"{', '.join(lacking)} cannot be loaded without the engine: options are not checked")
        return merged, plugins

    def read(self, catalog: Catalog) -> ConfigSource:
        """All sources as one. Raises what is wrong with the kernel's own keys, and all else that is known by then.

        Most plugins import torch, which takes seconds; a schedule is pure data. What plugins may yet suggest is left
        to later checks.
        """
        self._notices += catalog.notices
        merged = read_sources(self._request, self._findings, self._notices, self._latest)
        sections: Mapping[str, type[Section]] = {"": Header, **SECTIONS}
        for name, model in sections.items():
            validate_section(model, name, merged.values, self._findings, partial=True)
        if not self._findings.problems:
            return merged
        check_names(merged, catalog, self._findings)
        chosen = choose_plugins(merged, (), catalog, self._findings, self._notices, kinds=("schedule",))
        with_options("schedule", chosen.get("schedule", ()), merged, catalog, self._findings, self._notices)
        self._settle(_origins(merged))
        return merged

    def _section(self, model: type[AnySection], name: str, merged: ConfigSource) -> AnySection | None:
        """A section of the kernel, or None when something in it is wrong. No name: the keys above the sections."""
        return validate_section(model, name, merged.values, self._findings)

    def _strengths(
        self, run: RunSection | None, parallel: ParallelSection | None, train: TrainSection | None
    ) -> tuple[ParallelSection | None, ...]:
        """The parallel sizes to plan with, the best first: several where ``run.elastic`` chooses among ranks."""
        there = self._request.there
        if parallel is not None and parallel.data is not None:
            self._wanted = copy_ranks(parallel) * parallel.data
        if run is not None and run.min_ranks > 1 and run.elastic == "off":
            self._notices.append(f"run.min_ranks={run.min_ranks} changes nothing without run.elastic")
        if run is None or parallel is None or train is None or run.elastic == "off":
            self._nproc = self._request.nproc if there is None else there
            return (parallel,)
        most = most_ranks(parallel, self._request.nproc, there)
        if most is None:
            return (parallel,)
        self._nproc = None
        with self._findings.collect():
            return strengths(run, parallel, train, most)
        return (None,)

    def _split(
        self, choices: Sequence[ParallelSection | None], train: TrainSection | None, plugins: Plugins, catalog: Catalog
    ) -> tuple[Sizes | None, tuple[Place, ...], dict[int, Plan]]:
        """Sizes, layout and plans with the first of ``choices`` that can be planned, or what is wrong with the first.

        Only the schedule knows which numbers of microbatches it takes.
        """
        found = self._findings.problems
        known, first = len(found), None
        for parallel in choices:
            sizes = self._sizes(parallel, train, plugins)
            self._check_faults(sizes)
            fits = self._fits(parallel, train, plugins, catalog)
            counts = self._counts(train, parallel, sizes)
            split = sizes, *self._plans(plugins, parallel if fits else None, counts)
            if len(found) == known:
                return split
            first = first or (split, found[known:])
            del found[known:]
        assert first is not None, "there is a choice"
        found += first[1]
        return first[0]

    def _sizes(self, parallel: ParallelSection | None, train: TrainSection | None, plugins: Plugins) -> Sizes | None:
        """The size of every axis, None when it is unknown.

        An invalid split of experts leaves the other sizes known, unless the number of ranks follows from it.
        """
        if parallel is None:
            return None
        self._notices += idle_keys(parallel)
        nproc, experts = self._nproc, experts_of(_ready(plugins.get("model", ())))
        if experts is not None:
            right = False
            with self._findings.collect():
                ExpertSplit(experts, parallel, train, nproc).check()
                right = True
            if not right and nproc is None and parallel.data is None:
                return None
            parallel = parallel if right else parallel.model_copy(update={"expert": 1})
        with self._findings.collect():
            return infer_sizes(parallel, nproc)
        return None

    def _check_faults(self, sizes: Sizes | None) -> None:
        """Validate requested fault injection, and add a notice: the variable may be left over in a shell."""
        if sizes is not None:
            with self._findings.collect():
                wanted = max(sizes.world, self._wanted, self._request.nproc or 0)
                if read_faults(self._request.environment, wanted):
                    self._notices.append(f"faults are injected: {VARIABLE}={self._request.environment[VARIABLE]}")

    def _fits(
        self, parallel: ParallelSection | None, train: TrainSection | None, plugins: Plugins, catalog: Catalog
    ) -> bool:
        """Whether the chosen plugins fit together and serve the sizes that were asked for.

        A precision that none serves and layers that do not stack are problems too, but a schedule can be planned.
        """
        if not plugins.keys() >= set(RUN_KINDS):  # the plugin that is missing might have been the one that serves
            return False
        everyone = [plugin for stack in plugins.values() for plugin in stack]
        sizes = {f"parallel.{key}": getattr(parallel, key) for key in _SERVED} if parallel is not None else {}
        precision = {"train.precision": train.precision} if train is not None else {}
        others: list[RunError] = [*misstacked(plugins["parallel-layer"])]
        problems: list[RunError] = []
        if all(plugin.loaded or known_plugin(plugin.kind, plugin.name) for plugin in everyone):  # else nobody knows
            problems = [*mismatches(everyone, catalog), *unserved(sizes, everyone, catalog)]
            others += unserved(precision, everyone, catalog)
        for problem in (*problems, *others):
            self._findings.add(problem)
        return not problems

    def _counts(
        self, train: TrainSection | None, parallel: ParallelSection | None, sizes: Sizes | None
    ) -> tuple[int, ...]:
        if train is None:
            return ()
        with self._findings.collect():
            check_rates(train)
        if parallel is not None and sizes is not None:
            with self._findings.collect():
                return microbatch_counts(train, sizes.data, source_of_data(parallel, self._nproc))
        return ()

    def _plans(
        self, plugins: Plugins, parallel: ParallelSection | None, counts: tuple[int, ...]
    ) -> tuple[tuple[Place, ...], dict[int, Plan]]:
        """Where layers live, and a proven plan for each of ``counts``; empty when what they need is wrong."""
        schedule, model = (_ready(plugins.get(kind, ())) for kind in ("schedule", "model"))
        if parallel and schedule and model and schedule.loaded:
            with self._findings.collect():
                return plan_run(schedule, layers_of(model), parallel, counts)
        return (), {}

    def _ask_plugins(self, plugins: Plugins, config: Config, origins: Mapping[Key, Origin]) -> None:
        """Collect each plugin's notices about the whole configuration. Raises what any of them refuses."""
        for plugin in (plugin for stack in plugins.values() for plugin in stack):
            with self._findings.collect():
                self._notices += plugin.check_config(config)
        self._settle(origins)

    def _settle(self, origins: Mapping[Key, Origin]) -> None:
        """Raise everything that was found, each with where it came from."""
        for problem in self._findings.problems:
            attribute(problem, origins)
        self._findings.settle()


def _sure(part: Part | None) -> Part:
    """``part``, which cannot be None after :meth:`Findings.settle` has raised nothing."""
    assert part is not None, "what is missing was found and raised"
    return part


def _ready(plugins: tuple[Plugin, ...]) -> Plugin | None:
    """The one plugin of a kind, when its options are valid."""
    return next((plugin for plugin in plugins if plugin.options is not None), None)


def _origins(merged: ConfigSource) -> dict[Key, Origin]:
    """Where each key came from; of a kind that takes several plugins, where the last of them did."""
    uses: dict[Key, Origin] = {
        (section_of(kind), "use"): chosen[-1].origin for kind, chosen in merged.choices.items() if chosen
    }
    return uses | {key: value.origin for key, value in merged.values.items()}
