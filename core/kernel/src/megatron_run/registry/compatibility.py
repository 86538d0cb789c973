"""Checks that the chosen plugins are compatible, and that one of them serves every requested size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from megatron_run.errors import InputError, PluginError
from megatron_run.registry.discover import Catalog
from megatron_run.registry.known import Known, known_providers
from megatron_run.registry.loaded_plugin import Plugin

#: Words of a key that a plugin must serve, and the setting to make where none shall.
_SERVED_WORDS: Mapping[str, str] = MappingProxyType({"train.precision=fp16": "train.precision=bf16"})


def mismatches(plugins: Sequence[Plugin], catalog: Catalog) -> list[PluginError]:
    """An error for each required ability that no plugin provides, and for each conflict between two plugins."""
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


def misstacked(layers: Sequence[Plugin]) -> list[InputError]:
    """An error unless exactly one factory of ``layers`` makes every layer itself, and it is the lowest.

    A factory hook that asks for ``base`` changes layers of the factory below. Objects handed in from Python do not say
    what they do, nor does a plugin that was not loaded; they are left alone.
    """
    named = [plugin for plugin in layers if plugin.entry and plugin.loaded]
    whole = [plugin for plugin in named if not plugin.takes("base")]
    changing = [plugin for plugin in named if plugin.takes("base")]
    if len(whole) > 1:
        what, why = f"{' and '.join(map(str, whole))} each make every layer", "the upper would hide the lower"
    elif changing and layers[0] is changing[0]:
        what, why = f"{changing[0]} changes layers of the factory below it", "there is none below it"
    else:
        return []
    above = "".join(f"+{plugin.reference}" for plugin in changing)
    stacks = [
        f"--plugin parallel-layer={lowest}{above}" for lowest in [plugin.reference for plugin in whole] or ["dense"]
    ]
    return [InputError(what, why=why, origin=named[0].origin, fix=f"write {' or '.join(stacks)}")]


def unserved(settings: Mapping[str, int | str], plugins: Sequence[Plugin], catalog: Catalog) -> list[InputError]:
    """An error for each setting that needs a plugin's service and gets none.

    ``settings`` maps keys to values. One above 1, or true, needs a plugin that provides the key
    (``parallel.pipeline``), and a word that works only with the help of a plugin one that provides ``key=word``
    (``train.precision=fp16``). The error names the plugin that would serve it.
    """
    abilities = _abilities(plugins)
    needs = {key: _needs(key, value) for key, value in settings.items()}
    return [
        _unserved(key, settings[key], ability, plugins, catalog)
        for key, ability in needs.items()
        if ability and ability not in abilities
    ]


def _needs(key: str, value: int | str) -> str:
    """The ability that serves ``key`` at ``value``; empty when it needs no service."""
    if isinstance(value, str):
        setting = f"{key}={value}"
        return setting if setting in _SERVED_WORDS else ""
    return key if value is True or value > 1 else ""


def _unserved(key: str, value: int | str, ability: str, plugins: Sequence[Plugin], catalog: Catalog) -> InputError:
    providers = known_providers(ability)
    kinds = {provider.kind for provider in providers}
    chosen = ", ".join(str(plugin) for plugin in plugins if plugin.kind in kinds)
    instead = _SERVED_WORDS.get(ability, f"{key}={'false' if value is True else 1}")
    return InputError(
        f"{key}={str(value).lower()} needs a plugin that serves it",
        why=f"{chosen} does not" if chosen else "no chosen plugin does",
        fix="; or ".join(filter(None, (_advice(providers, catalog), f"set {instead}"))),
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
    """How to get one of ``providers``: choose an installed one, else install one."""
    installed = [known for known in providers if catalog.offering(known.kind, known.name)]
    if installed:
        return f"choose {' or '.join(_typed(known) for known in installed)}"
    return " or ".join(f"{known.how_to_get} and choose {_typed(known)}" for known in providers)


def _typed(known: Known) -> str:
    return f"--plugin {known.kind}={known.name}"


def _abilities(plugins: Iterable[Plugin]) -> frozenset[str]:
    return frozenset[str]().union(*(plugin.provides for plugin in plugins))
