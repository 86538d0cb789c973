"""``config explain`` and ``plugins info``: what a key means, read from the models that validate it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from shlex import quote
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_run.config.fields import meanings, walk
from megatron_run.config.origin import KIND_SECTIONS, Key, dotted, section_of
from megatron_run.config.sources import DEFAULT_PLUGINS, RULES
from megatron_run.config.values import members, plain, typed
from megatron_run.contracts.meaning import change_of
from megatron_run.contracts.option_groups import OF_FILES
from megatron_run.contracts.plugin import RUN_KINDS, SEPARATORS
from megatron_run.contracts.quantities import Duration, Span
from megatron_run.contracts.schema import SECTIONS, Header
from megatron_run.errors import EngineMissingError, InputError, PluginError
from megatron_run.errors.install_hint import ENGINE, how_to_install
from megatron_run.errors.wording import did_you_mean
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_cli.reports.config_report import show_json

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun


#: Attributes of a field's constraints, and each bound in words.
_BOUNDS = {
    "gt": "above {}",
    "ge": "at least {}",
    "lt": "below {}",
    "le": "at most {}",
    "multiple_of": "a multiple of {}",
    "min_length": "length at least {}",
}
_NAMES: Mapping[type, str] = {
    int: "int",
    float: "number",
    bool: "true or false",
    str: "text",
    Span: "span",
    Duration: "time",
}


#: The type of a key whose value has keys of its own, of any names.
_MAPPING = "dict"


@dataclass(frozen=True)
class KeyInfo:
    """One key of the kernel or one option of a plugin, named as it is written.

    ``default`` is as a file writes it, None where the key must be set. ``owner`` is the plugin whose option it is.
    ``choices`` are the words that it takes, where its type names some; ``files``: it names files or folders.
    ``changes`` says whether a run that goes on, or starts from weights, may have another value.
    """

    name: str
    type: str
    default: str | None
    bounds: str
    description: str
    owner: str = ""
    choices: tuple[str, ...] = ()
    changes: str = ""
    files: bool = False

    @property
    def kind(self) -> str:
        """Type and bounds: ``int, at least 1``."""
        return ", ".join(filter(None, (self.type, self.bounds)))

    @property
    def default_text(self) -> str:
        """The default, or that there is none."""
        return self.default or "required"

    def __str__(self) -> str:
        rows = {
            "type": self.kind,
            "default": self.default_text,
            "meaning": self.description,
            "changes": self.changes,
            "option of": self.owner,
        }
        return "\n".join([self.name, *(f"  {name:10} {text}" for name, text in rows.items() if text)])


def explain(key: str, run: ResolvedRun | None = None) -> str:
    """The meaning of ``key`` (``train.lr``), or of each key of a section (``train``): type, default, bounds, meaning.

    With ``run``, also the value it has there and where it came from. Options are those of the run's plugins, or of
    every installed plugin. Raises :class:`InputError` for an unknown key, and for an option that only the engine knows
    :class:`EngineMissingError`; for one of a file of the run, which is not run, :class:`PluginError`.
    """
    first, *rest = key.split(".")
    wanted = dotted((section_of(first), *rest))
    plugins, lacking, _ = installed_plugins() if run is None else _of_run(run)
    known = list(all_keys(plugins))
    found = _named(wanted, [*_own_keys(wanted, plugins), *known])
    if not found and (unknown := [plugin for plugin in lacking if _section(plugin) == section_of(first)]):
        raise _not_run(unknown, run) or without_engine(unknown)
    if not found:
        names = [info.name for info in known]
        sections = dict.fromkeys(name.partition(".")[0] for name in names)
        meant = [name for name in names if name.rpartition(".")[2] == key]
        hint = f"type {' or '.join(meant)}" if meant else did_you_mean(key, names)
        raise InputError(f"there is no key {key!r}", fix=hint or f"the sections are {', '.join(sections)}")
    values = show_json(run) if run is not None else {}
    return "\n\n".join(_with_value(info, values) for info in found)


def _named(wanted: str, known: Sequence[KeyInfo]) -> list[KeyInfo]:
    """The keys that ``wanted`` is or begins; of an entry of a mapping, that mapping."""
    held = [info for info in known if f"{info.name}.".startswith(f"{wanted}.")]
    return held or [info for info in known if info.type == _MAPPING and wanted.startswith(f"{info.name}.")]


def _own_keys(wanted: str, plugins: Iterable[Plugin]) -> Iterator[KeyInfo]:
    """The keys of one of several plugins, which ``wanted`` names: ``observer.jsonl.every``."""
    section, _, rest = wanted.partition(".")
    for plugin in plugins:
        named = plugin.kind in SEPARATORS and f"{rest}.".startswith(f"{plugin.name}.")
        if named and section_of(plugin.kind) == section_of(section):
            yield from model_keys(plugin.options_model, (section, plugin.name), str(plugin))


def _of_run(run: ResolvedRun) -> Installed:
    """The plugins of ``run``."""
    plugins = tuple(plugin for stack in run.plugins.values() for plugin in stack)
    return Installed(plugins, tuple(map(str, run.unloaded)), ())


def _section(plugin: str) -> str:
    """The section of ``KIND=NAME``."""
    return section_of(plugin.partition("=")[0])


def _not_run(unknown: Sequence[str], run: ResolvedRun | None) -> PluginError | None:
    """That options of the first file among the ``unknown`` plugins cannot be told; None where no file is."""
    for plugin in run.unloaded if run is not None else ():
        if str(plugin) in unknown and plugin.entry is not None and plugin.entry.file:
            what = f"the options of {plugin} are not known"
            why = f"it is a file, which was not run: {plugin.entry.file}"
            command = f"megatron-run plugins info {plugin.kind}={quote(plugin.entry.value)}"
            return PluginError(what, why=why, fix=f"to run it and see them, type: {command}")
    return None


def _with_value(info: KeyInfo, values: Mapping[str, Any]) -> str:
    """``info`` with its value among ``values``, a mapping's with each entry's; several plugins have their own."""
    section, _, rest = info.name.partition(".")
    found: dict[str, Any] = {}
    for name in (info.name, f"{section}.{info.owner.partition('=')[2]}.{rest}"):
        own = [key for key in values if key == name or (info.type == _MAPPING and key.startswith(f"{name}."))]
        found |= {key.removeprefix(name)[1:]: values[key] for key in own}
    entries = {f"{entry}=" if entry else "": each for entry, each in found.items()}
    here = (f"  {'here':10} {entry}{each['value']} (from {each['origin']})" for entry, each in entries.items())
    return "\n".join([str(info), *here])


class Installed(NamedTuple):
    """The installed plugins that can be loaded, ``lacking`` those that need the engine, and a notice for each other."""

    plugins: tuple[Plugin, ...]
    lacking: tuple[str, ...]
    notices: tuple[str, ...]


def installed_plugins() -> Installed:
    """Load every installed plugin that a run can choose."""
    catalog = scan()
    plugins, notices, lacking = [], [], []
    for entry in (entry for entry in catalog.entries if entry.kind in RUN_KINDS):
        try:
            chosen = choose(catalog, entry.kind, f"{entry.distribution}:{entry.name}", "installed")
            plugins.append(load(chosen, "installed"))
        except EngineMissingError:
            lacking.append(str(entry))
        except PluginError as error:
            notices.append(str(error))
    return Installed(tuple(plugins), tuple(lacking), tuple(notices))


def without_engine(lacking: Iterable[str]) -> EngineMissingError:
    """That the options of the plugins in ``lacking`` cannot be told."""
    what = f"the options of {', '.join(lacking)} are not known"
    return EngineMissingError(what, why="these plugins need the engine", fix=f"type: {how_to_install(ENGINE)}")


def all_keys(plugins: Iterable[Plugin]) -> Iterator[KeyInfo]:
    """Every key of the kernel, then every option of ``plugins``."""
    yield from kernel_keys()
    for plugin in plugins:
        yield from model_keys(plugin.options_model, (section_of(plugin.kind),), str(plugin))


def kernel_keys() -> Iterator[KeyInfo]:
    """Every key that belongs to the kernel, and each kind's ``use``, in the order of the sections."""
    yield from model_keys(Header, ())
    for name, model in SECTIONS.items():
        yield from model_keys(model, (name,))
    for section, kind in KIND_SECTIONS.items():
        several = f"names of plugins, separated by {SEPARATORS[kind]}" if kind in SEPARATORS else "name of a plugin"
        meaning = "NAME, DIST:NAME or a file ./mine.py"
        yield KeyInfo(dotted((section, "use")), several, _default_plugins(kind) or None, "", meaning)


def _default_plugins(kind: str) -> str:
    """The default of ``kind.use`` in words: ``none; dynamic with train.precision=fp16``; empty when there is none."""
    words = SEPARATORS.get(kind, "").join(DEFAULT_PLUGINS.get(kind, ()))
    return "; ".join(filter(None, (words, *(f"{rule.plugin} with {rule}" for rule in RULES.get(kind, ())))))


def model_keys(model: type[BaseModel], prefix: Key, owner: str = "") -> Iterator[KeyInfo]:
    """Every key of ``model``, and of the groups inside it."""
    for key, field in walk(model, prefix):
        bounds = ", ".join(
            text.format(getattr(rule, attribute))
            for rule in field.metadata
            for attribute, text in _BOUNDS.items()
            if getattr(rule, attribute, None) is not None
        )
        marks = meanings(field)  # without a section a plugin says what its marks do
        changes = change_of(dotted(key), marks) if prefix else "; ".join(mark.text for mark in marks)
        described = (_type_text(field.annotation), _default(field), bounds, field.description or "", owner)
        files = OF_FILES in field.metadata or "path" in described[0]
        yield KeyInfo(dotted(key), *described, choices=tuple(_choices(field.annotation)), changes=changes, files=files)


def _type_text(annotation: object) -> str:
    """A type in words: ``one of auto, cpu, cuda``, ``list of int``."""
    words = [_member_text(member) for member in members(annotation) if member is not NoneType]
    return " or ".join(dict.fromkeys(words))


def _member_text(member: Any) -> str:
    if get_origin(member) is Literal:
        values = ", ".join(map(str, get_args(member)))
        return f"one of {values}" if len(get_args(member)) > 1 else values
    if isinstance(member, type) and issubclass(member, Enum):
        return f"one of {', '.join(str(each.value) for each in member)}"
    if isinstance(member, type) and issubclass(member, PurePath):
        return "path"
    if isinstance(member, type) and issubclass(member, BaseModel):
        return "keys"
    outer = get_origin(member) or member
    if isinstance(outer, type) and issubclass(outer, Mapping):
        return _MAPPING
    if isinstance(outer, type) and issubclass(outer, Sequence) and outer is not str:
        items = [_type_text(each) for each in get_args(member) if each is not Ellipsis]
        return f"list of {' or '.join(dict.fromkeys(items)) or 'any'}"
    return _NAMES.get(member, getattr(member, "__name__", str(member)))


def _choices(annotation: object) -> Iterator[str]:
    """The words that a type names: of literals and enumerations, and of a truth value."""
    for member in members(annotation):
        if member is bool:
            yield from (typed(True), typed(False))
        elif get_origin(member) is Literal:
            yield from map(str, get_args(member))
        elif isinstance(member, type) and issubclass(member, Enum):
            yield from (str(each.value) for each in member)


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    data = plain(value)
    return data if isinstance(data, str) and data else "unset" if data is None else json.dumps(data)


@dataclass(frozen=True)
class Description:
    """A plugin that was imported, described: where from, what it provides and wants, its options.

    ``summary`` is its distribution's line.
    """

    kind: str
    name: str
    distribution: str
    version: str
    location: str
    api: int
    provides: tuple[str, ...]
    requires: tuple[str, ...]
    conflicts: tuple[str, ...]
    suggests: Mapping[str, str]
    suggests_with: Mapping[str, Mapping[str, str]]
    options: tuple[KeyInfo, ...]
    summary: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Description:
        """Read the form that ``dataclasses.asdict`` writes, after a trip through JSON."""
        words = {field: tuple(data[field]) for field in ("provides", "requires", "conflicts")}
        return cls(**{**data, **words, "options": tuple(map(_key_info, data["options"]))})


def _key_info(row: Mapping[str, Any]) -> KeyInfo:
    return KeyInfo(**{**row, "choices": tuple(row["choices"])})


def describe(plugin: Plugin) -> Description:
    """Everything there is to say about a loaded plugin."""
    info = plugin.info
    return Description(
        kind=plugin.kind,
        name=plugin.name,
        distribution=plugin.distribution,
        version=plugin.version,
        location=plugin.location,
        api=info.api,
        provides=tuple(sorted(info.provides)),
        requires=tuple(sorted(info.requires)),
        conflicts=tuple(sorted(info.conflicts)),
        suggests=_typed_values(info.suggests),
        suggests_with={option: _typed_values(values) for option, values in info.suggests_with.items()},
        options=tuple(model_keys(plugin.options_model, ())),
    )


def _typed_values(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: typed(value) for key, value in values.items()}
