"""The options of the chosen plugins: which belong to which, checked by each plugin's own model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_run.config.arguments import plugin_name
from megatron_run.config.layers import SEPARATORS, Layer
from megatron_run.config.origin import Key, Value, dotted, section_of
from megatron_run.config.problems import Findings
from megatron_run.config.validate import fields_of, unknown_key, validate
from megatron_run.contracts.schema import PluginSection, PluginsSection
from megatron_run.registry.known import known_owners
from megatron_run.registry.load import Plugin


def with_options(
    kind: str, plugins: tuple[Plugin, ...], layer: Layer, findings: Findings, notices: list[str]
) -> tuple[Plugin, ...]:
    """The plugins of one kind with validated options.

    An option belongs to every plugin of the section that has it; where a kind takes several, ``observer.NAME.OPTION``
    is for one. Options written while another plugin was chosen are dropped, with one notice, where they do not fit.
    """
    section = section_of(kind)
    values = {key[1:]: value for key, value in layer.values.items() if key[0] == section}
    owned: dict[str, dict[Key, Value]] = {plugin.name: {} for plugin in plugins}
    dropped: list[str] = []
    owner = f"{kind}={'+'.join(plugin.name for plugin in plugins)}"
    for key, value in values.items():
        owners = _owners(kind, key, plugins)
        for name, inner in owners.items():
            owned[name][inner] = value
        if owners or not _reachable(kind, key, plugins, layer):
            continue
        if value.inherited:
            dropped.append(dotted((section, *key)))
        else:
            known = dict.fromkeys(field for plugin in plugins for field in fields_of(plugin.options_model))
            findings.add(unknown_key((section,), key[0], known, value.origin, owner, _who_has(kind, key[0])))
    if dropped:
        notices.append(f"{owner} has no {', '.join(dropped)}, written for another {kind}: dropped")
    return tuple(_validated(plugin, owned[plugin.name], findings) for plugin in plugins)


def _owners(kind: str, key: Key, plugins: tuple[Plugin, ...]) -> dict[str, Key]:
    """The plugins that an option belongs to, and what it is called there."""
    if kind in SEPARATORS and len(key) > 1 and key[0] in {plugin.name for plugin in plugins}:
        return {key[0]: key[1:]}
    return {plugin.name: key for plugin in plugins if key[0] in fields_of(plugin.options_model)}


def _who_has(kind: str, option: str) -> str:
    """What to choose to have ``option``, where a package of ours is known to."""
    owners = [f"--plugin {kind}={known.name}" for known in known_owners(kind, option)]
    return f"choose {' or '.join(owners)}, which has it" if owners else ""


def _reachable(kind: str, key: Key, plugins: tuple[Plugin, ...], layer: Layer) -> bool:
    """False for the options of a plugin that is chosen and not here: that is a problem, or a notice, of its own."""
    names = {plugin.name for plugin in plugins}
    missing = {choice.word for choice in layer.choices.get(kind, ())} - names
    return kind not in SEPARATORS or len(key) == 1 or key[0] not in missing


def _validated(plugin: Plugin, values: Mapping[Key, Value], findings: Findings) -> Plugin:
    why = f"{plugin} needs it"
    options = validate(plugin.options_model, (section_of(plugin.kind),), values, findings, fix_missing=why)
    return plugin.with_options(options) if options is not None else plugin


def kind_section(kind: str, plugins: tuple[Plugin, ...], layer: Layer) -> PluginSection | PluginsSection:
    """The section of a kind in the resolved configuration: plugins as they were named, options with every default."""
    words = {plugin_name(choice.word): choice.word for choice in layer.choices.get(kind, ())}
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
