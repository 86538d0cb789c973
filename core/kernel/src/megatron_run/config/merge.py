"""One source of configuration, and the merge of several in which the stronger overrides the weaker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_run.config.origin import KIND_SECTIONS, Choice, Key, Origin, Value, dotted, section_of
from megatron_run.config.yaml import Node, bare
from megatron_run.contracts.plugin import SEPARATORS
from megatron_run.contracts.schema import RIVALS, SECTIONS
from megatron_run.errors import Findings, InputError
from megatron_run.errors.wording import did_you_mean


@dataclass
class ConfigSource:
    """One source of configuration (a file, the command line), or the result of a merge.

    ``values`` are leaves by key; ``choices`` the plugins by kind; ``added`` are plugins to add to a weaker source's
    choice, which only kind ``observer`` has.
    """

    values: dict[Key, Value] = field(default_factory=dict)
    choices: dict[str, tuple[Choice, ...]] = field(default_factory=dict)
    added: dict[str, tuple[Choice, ...]] = field(default_factory=dict)

    def put(self, key: Key, data: Any, origin: Origin) -> None:
        """Set a leaf. Raises :class:`InputError` when this source has it already."""
        if key in self.values:
            origins = dict.fromkeys((str(self.values[key].origin), str(origin)))
            raise InputError(f"{dotted(key)} is given twice", origin=" and ".join(origins), fix="keep one")
        self.values[key] = Value(data, origin)

    def choose(self, kind: str, references: tuple[str, ...], origin: Origin, *, add: bool = False) -> None:
        """Choose the plugins of a kind. Raises :class:`InputError` when this source has chosen already."""
        chosen = tuple(Choice(reference, origin) for reference in references)
        if add:
            self.added[kind] = self.added.get(kind, ()) + chosen
            return
        if kind in self.choices:
            first = self.choices[kind][0]
            raise InputError(
                f"{kind} is chosen twice: {first.reference} and {'+'.join(references)}",
                origin=f"{first.origin} and {origin}",
                fix=f"keep one{'; stack with +' if kind == 'parallel-layer' else ''}",
            )
        self.choices[kind] = chosen


def source_from(sections: Mapping[str, Node], findings: Findings) -> ConfigSource:
    """Build the source from a parsed file or a mapping. Unknown sections and wrong shapes enter ``findings``."""
    source = ConfigSource()
    for section, node in sections.items():
        with findings.collect():
            assign(source, (section,), node)
    return source


def assign(source: ConfigSource, key: Key, node: Node) -> None:
    """Put ``node``, a value or a nested mapping, at ``key``. Raises :class:`InputError`."""
    section = known_section(key[0], node.origin)
    key = (section, *key[1:])
    kind = KIND_SECTIONS.get(section)
    if kind and key[1:] in ((), ("use",)) and not isinstance(node.data, dict):
        if node.data is not None:
            source.choose(kind, plugin_words(kind, node.data, node.origin), node.origin)
        return
    if kind and len(key) > 2 and key[1] == "use":
        raise InputError(f"{dotted(key[:2])} has no keys of its own, got {dotted(key)}", origin=str(node.origin))
    if len(key) == 1 and section != "version" and not isinstance(node.data, dict):
        if node.data is None:
            return
        raise InputError(f"{section} is a section, not a value", origin=str(node.origin), fix=f"write {section}.KEY")
    if isinstance(node.data, dict) and (node.data or len(key) == 1):
        for name, each in node.data.items():
            assign(source, (*key, name), each)
        return
    source.put(key, bare(node), node.origin)


def known_section(key: str, origin: Origin) -> str:
    """The section that ``key`` names, ``-`` or ``_``. Raises :class:`InputError` with the nearest."""
    section = key.replace("-", "_")
    if section == "version" or section in SECTIONS or section in KIND_SECTIONS:
        return section
    sections = (*SECTIONS, *KIND_SECTIONS.values())
    keys = [f"{name}.{section}" for name, model in SECTIONS.items() if section in model.model_fields]
    raise InputError(
        f"unknown section {key!r}",
        origin=str(origin),
        fix=f"write {' or '.join(keys)}"
        if keys
        else did_you_mean(key, sections) or f"the sections are {', '.join(sections)}",
    )


def plugin_words(kind: str, data: object, origin: Origin) -> tuple[str, ...]:
    """The plugins that ``data`` names: one name, or for some kinds several (``tensor+mine``, a list)."""
    separator = SEPARATORS.get(kind)
    names = data if isinstance(data, list) else [data]
    if separator:
        names = [part.strip() for name in names for part in str(name).split(separator)] if data else []
    if kind == "observer" and not names:
        return ()
    if not names or not all(isinstance(name, str | int) and str(name) for name in names) or isinstance(data, bool):
        raise InputError(f"{kind}.use={data!r} is not the name of a plugin", origin=str(origin))
    if len(names) > 1 and not separator:
        raise InputError(f"{kind} takes one plugin, not {len(names)}", origin=str(origin))
    return tuple(str(name) for name in names)


def merge(sources: Iterable[ConfigSource]) -> ConfigSource:
    """Merge ``sources``, given from weak to strong: mappings merge, lists and scalars replace."""
    merged = ConfigSource()
    for source in sources:
        for kind, choices in source.choices.items():
            _change_plugin(merged, kind, choices)
        for kind, added in source.added.items():
            present = {choice.reference for choice in merged.choices.get(kind, ())}
            fresh = {choice.reference: choice for choice in added if choice.reference not in present}
            asked = {choice.reference: choice for choice in added}
            kept = tuple(asked.get(choice.reference, choice) for choice in merged.choices.get(kind, ()))
            merged.choices[kind] = kept + tuple(fresh.values())
        for key, value in source.values.items():
            for old in _covered(merged, source, key):
                del merged.values[old]
            merged.values[key] = value
    return merged


def _covered(merged: ConfigSource, source: ConfigSource, key: Key) -> list[Key]:
    """The weaker keys that ``key`` of ``source`` overrides: itself, those inside or around it, and its rivals."""
    rivals: set[Key] = set()
    if source.values[key].data is not None:
        rivals = {rival for group in RIVALS if key in group for rival in group} - source.values.keys()
    return [old for old in merged.values if _overlaps(old, key) or old in rivals]


def _change_plugin(merged: ConfigSource, kind: str, choices: tuple[Choice, ...]) -> None:
    """Replace the choice and mark the options written for the old one: those that the new plugin lacks are dropped."""
    old = {choice.reference for choice in merged.choices.get(kind, ())}
    merged.choices[kind] = choices
    if old == {choice.reference for choice in choices}:
        return
    section = section_of(kind)
    for key, value in merged.values.items():
        if key[0] == section:
            merged.values[key] = replace(value, inherited=True)


def _overlaps(old: Key, new: Key) -> bool:
    """Whether one key equals the other or lies inside it, so that only one of them can be set."""
    shorter = min(len(old), len(new))
    return old[:shorter] == new[:shorter]
