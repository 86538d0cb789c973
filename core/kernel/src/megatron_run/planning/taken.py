"""The configuration as a run takes it: what was written, what the chosen plugins suggest, and what they decide.

Whoever reads the configuration of a run begins here: a training, a dry run, a plan, the picture of a schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, MutableMapping
from typing import NamedTuple

from megatron_run import __version__
from megatron_run.config.merge import ConfigSource
from megatron_run.config.origin import Choice
from megatron_run.config.sources import plugin_name
from megatron_run.contracts.plugin import RUN_KINDS
from megatron_run.errors import Findings, PluginError
from megatron_run.planning.choosing import apply_suggestions, choose_plugins, with_options
from megatron_run.planning.decided import apply_decided
from megatron_run.planning.fetched import fetch_tokenizer
from megatron_run.planning.latest_runs import name_runs_in
from megatron_run.registry.discover import Catalog
from megatron_run.registry.known import known_plugin
from megatron_run.registry.loaded_plugin import Plugin, unloaded


class Taken(NamedTuple):
    """The configuration, and the chosen plugins by kind, those that were imported with their options."""

    merged: ConfigSource
    plugins: dict[str, tuple[Plugin, ...]]


def take(
    merged: ConfigSource,
    catalog: Catalog,
    findings: Findings,
    notices: list[str],
    objects: Iterable[object] = (),
    *,
    imported: Collection[str] = RUN_KINDS,
    plan_only: bool = False,
    latest: MutableMapping[str, str] | None = None,
) -> Taken:
    """All sources, ``merged``, as a run takes them. Errors enter ``findings``.

    ``objects`` and ``plan_only`` are those of :func:`~megatron_run.planning.choosing.choose_plugins`. Who needs the
    plugins of some kinds alone has these ``imported``. Of the others no first-party one is: the kernel knows what it
    suggests; one that cannot be imported suggests nothing. ``latest`` is what
    :func:`~megatron_run.config.sources.read_sources` has filled.
    """
    chosen = choose_plugins(merged, objects, catalog, findings, notices, imported, plan_only=plan_only)
    others = {
        kind: tuple(_standing_in(merged, catalog, kind, choice) for choice in merged.choices.get(kind, ()))
        for kind in RUN_KINDS
        if kind not in imported
    }
    everyone = {kind: chosen.get(kind, ()) + others.get(kind, ()) for kind in RUN_KINDS}
    merged = apply_decided(apply_suggestions(merged, everyone, notices), everyone)
    if "data" in imported:
        merged = fetch_tokenizer(merged, findings, notices.append)
    ready = {kind: with_options(kind, stack, merged, catalog, findings, notices) for kind, stack in chosen.items()}
    known = {} if latest is None else latest
    named = {kind: tuple(_naming_runs(plugin, known) for plugin in stack) for kind, stack in ready.items()}
    return Taken(merged, {**others, **named})


def _naming_runs(plugin: Plugin, latest: MutableMapping[str, str]) -> Plugin:
    return plugin if plugin.options is None else plugin.with_options(name_runs_in(plugin.options, latest))


def _standing_in(merged: ConfigSource, catalog: Catalog, kind: str, choice: Choice) -> Plugin:
    """A plugin that nobody asks for more than what it suggests."""
    name = plugin_name(choice.reference)
    known = known_plugin(kind, name)
    offers = [(each.distribution, each.version) for each in catalog.offering(kind, name)]
    if known is None or offers != [(known.distribution, __version__)]:
        alone = ConfigSource(values=merged.values, choices={kind: (choice,)})
        found = choose_plugins(alone, (), catalog, Findings(), [], (kind,), plan_only=True).get(kind, ())
        if found:
            return found[0]
    return unloaded(kind, name, str(choice.origin), None, PluginError(f"{kind}={name} was not imported"))
