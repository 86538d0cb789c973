"""Assigns options to the chosen plugins and validates them with each plugin's own model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from megatron_run.config.arguments import plugin_name
from megatron_run.config.merge import SEPARATORS, ConfigSource
from megatron_run.config.origin import Key, Value, dotted, section_of
from megatron_run.config.problems import Findings
from megatron_run.config.validate import fields_of, unchecked, unknown_key, validate
from megatron_run.contracts.schema import PluginSection, PluginsSection
from megatron_run.errors import PluginError
from megatron_run.registry.discover import Catalog
from megatron_run.registry.known import known_plugin
from megatron_run.registry.load import load
from megatron_run.registry.loaded_plugin import Plugin, UncheckedOptions


def with_options(
    kind: str,
    plugins: tuple[Plugin, ...],
    merged: ConfigSource,
    catalog: Catalog,
    findings: Findings,
    notices: list[str],
) -> tuple[Plugin, ...]:
    """The plugins of one kind with validated options.

    An option belongs to every plugin of the section that has it; where a kind takes several, ``observer.NAME.OPTION``
    is for one. Options written while another plugin was chosen are dropped, with one notice, where they do not fit.
    """
    section = section_of(kind)
    values = {key[1:]: value for key, value in merged.values.items() if key[0] == section}
    owned: dict[str, dict[Key, Value]] = {plugin.name: {} for plugin in plugins}
    dropped: list[str] = []
    owner = f"{kind}={'+'.join(plugin.name for plugin in plugins)}"
    for key, value in values.items():
        owners = _owners(kind, key, plugins)
        for name, inner in owners.items():
            owned[name][inner] = value
        if owners or not _reachable(kind, key, plugins, merged):
            continue
        if value.inherited:
            dropped.append(dotted((section, *key)))
        else:
            known = dict.fromkeys(field for plugin in plugins for field in fields_of(plugin.options_model))
            findings.add(unknown_key((section,), key[0], known, value.origin, owner, _who_has(kind, key[0], catalog)))
    if dropped:
        notices.append(f"{owner} has no {', '.join(dropped)}, written for another {kind}: dropped")
    return tuple(_validated(plugin, owned[plugin.name], findings) for plugin in plugins)


def _owners(kind: str, key: Key, plugins: tuple[Plugin, ...]) -> dict[str, Key]:
    """The plugins that an option belongs to, and what it is called there."""
    if kind in SEPARATORS and len(key) > 1 and key[0] in {plugin.name for plugin in plugins}:
        return {key[0]: key[1:]}
    return {plugin.name: key for plugin in plugins if not plugin.loaded or key[0] in fields_of(plugin.options_model)}


def _who_has(kind: str, option: str, catalog: Catalog) -> str:
    """What to choose to have ``option``. For an error only: it loads the first-party plugins that are installed."""
    owners = []
    for entry in catalog.of_kind(kind):
        if known_plugin(kind, entry.name):
            with suppress(PluginError):
                if option in fields_of(load(entry, "").options_model):
                    owners.append(f"--plugin {entry}")
    return f"choose {' or '.join(owners)}, which has it" if owners else ""


def _reachable(kind: str, key: Key, plugins: tuple[Plugin, ...], merged: ConfigSource) -> bool:
    """False for options of a chosen plugin that could not be loaded, which has its own error or notice."""
    names = {plugin.name for plugin in plugins}
    missing = {choice.word for choice in merged.choices.get(kind, ())} - names
    return kind not in SEPARATORS or len(key) == 1 or key[0] not in missing


def _validated(plugin: Plugin, values: Mapping[Key, Value], findings: Findings) -> Plugin:
    if not plugin.loaded:
        return plugin.with_options(UncheckedOptions(**unchecked((section_of(plugin.kind),), values, findings)))
    why = f"{plugin} needs it"
    options = validate(plugin.options_model, (section_of(plugin.kind),), values, findings, fix_missing=why)
    return plugin.with_options(options) if options is not None else plugin


def kind_section(kind: str, plugins: tuple[Plugin, ...], merged: ConfigSource) -> PluginSection | PluginsSection:
    """The section of a kind in the resolved configuration: plugins as they were named, options with every default."""
    words = {plugin_name(choice.word): choice.word for choice in merged.choices.get(kind, ())}
    uses = tuple(words.get(plugin.name, plugin.name) for plugin in plugins)
    if kind in SEPARATORS:
        options = {plugin.name: dumped(plugin) for plugin in plugins if dumped(plugin)}
        return PluginsSection(use=uses, options=options)
    return PluginSection(use=uses[0], options=dumped(plugins[0]))


def dumped(plugin: Plugin, *, defaults: bool = True) -> dict[str, Any]:
    """A plugin's options as plain data, with or without those that have their defaults."""
    if plugin.options is None:
        return {}
    return plugin.options.model_dump(mode="json", by_alias=True, exclude_defaults=not defaults)
