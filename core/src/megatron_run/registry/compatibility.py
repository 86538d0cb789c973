"""Whether the chosen plugins fit each other, and whether something serves every size that was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron_run.errors import InputError, PluginError
from megatron_run.registry.discover import Catalog
from megatron_run.registry.known import Known, known_providers
from megatron_run.registry.plugin import Plugin


def misfits(plugins: Sequence[Plugin], catalog: Catalog) -> list[PluginError]:
    """Every ability that a plugin requires and none provides, and every one that it conflicts with and another has."""
    abilities = _abilities(plugins)
    problems = []
    for plugin in plugins:
        problems += [_lacking(plugin, ability, catalog) for ability in sorted(plugin.info.requires - abilities)]
        others = [other for other in plugins if other is not plugin]
        problems += [
            _conflicting(plugin, other, ability)
            for other in others
            for ability in sorted(plugin.info.conflicts & other.provides)
        ]
    return problems


def unserved(sizes: Mapping[str, int], plugins: Sequence[Plugin], catalog: Catalog) -> list[InputError]:
    """Every configuration key of ``sizes`` that is above 1 (or true) and that no chosen plugin provides.

    ``sizes`` maps keys such as ``parallel.pipeline`` to their values; the error names the plugin that would serve it.
    """
    abilities = _abilities(plugins)
    asked = (key for key, size in sizes.items() if (size is True or size > 1) and key not in abilities)
    return [_unserved(key, sizes[key], plugins, catalog) for key in asked]


def _unserved(key: str, size: int, plugins: Sequence[Plugin], catalog: Catalog) -> InputError:
    providers = known_providers(key)
    kinds = {provider.kind for provider in providers}
    chosen = ", ".join(str(plugin) for plugin in plugins if plugin.kind in kinds)
    smallest = f"set {key}={'false' if size is True else 1}"
    return InputError(
        f"{key}={str(size).lower()} needs a plugin that serves it",
        why=f"{chosen} does not" if chosen else "no chosen plugin does",
        fix="; or ".join(filter(None, (_advice(providers, catalog), smallest))),
    )


def _lacking(plugin: Plugin, ability: str, catalog: Catalog) -> PluginError:
    typed = f"add --plugin {ability}" if "=" in ability else ""
    return PluginError(
        f"{plugin} requires {ability}, which no chosen plugin provides",
        origin=plugin.origin,
        fix=typed or _advice(known_providers(ability), catalog) or f"choose another {plugin.kind}",
    )


def _conflicting(plugin: Plugin, other: Plugin, ability: str) -> PluginError:
    return PluginError(
        f"{plugin} does not work together with {other}",
        why=f"{plugin} conflicts with {ability}",
        origin=plugin.origin,
        fix=f"choose another {plugin.kind} or another {other.kind}",
    )


def _advice(providers: Sequence[Known], catalog: Catalog) -> str:
    """What to type to get one of ``providers``: choose an installed one, else install one, else that it is planned."""
    installed = [known for known in providers if catalog.offering(known.kind, known.name)]
    if installed:
        return f"choose {' or '.join(_typed(known) for known in installed)}"
    available = [known for known in providers if known.available]
    if available:
        return " or ".join(f"{known.how_to_get} and choose {_typed(known)}" for known in available)
    return "; ".join(known.how_to_get for known in providers)


def _typed(known: Known) -> str:
    return f"--plugin {known.kind}={known.name}"


def _abilities(plugins: Iterable[Plugin]) -> frozenset[str]:
    return frozenset[str]().union(*(plugin.provides for plugin in plugins))
