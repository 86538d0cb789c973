"""Loads the plugins that the merged configuration chooses, applies what they suggest, and validates their options."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from megatron_run.config.fields import default_of, field_at, fields_of
from megatron_run.config.merge import ConfigSource, merge
from megatron_run.config.origin import DEFAULT, Choice, Key, Origin, Value, dotted, section_of
from megatron_run.config.run_home import config_file, run_home
from megatron_run.config.sources import DEFAULT_PLUGINS, default_source, plugin_name
from megatron_run.config.validate import knows, unchecked, unknown_key, validate
from megatron_run.config.values import typed
from megatron_run.contracts.plugin import RUN_KINDS, SEPARATORS, check_run_kind
from megatron_run.contracts.schema import PluginSection, PluginsSection
from megatron_run.errors import EngineMissingError, Findings, InputError, PluginError
from megatron_run.errors.wording import advice
from megatron_run.files.safe_folder import SafeFolder, parse_json
from megatron_run.registry.choose import choose, is_file
from megatron_run.registry.discover import Catalog, Entry, SourceDigests
from megatron_run.registry.importing import FileNotRunError
from megatron_run.registry.known import known_plugin
from megatron_run.registry.load import from_object, load
from megatron_run.registry.loaded_plugin import Plugin, UncheckedOptions, unloaded

#: Kinds to which a plugin handed in from Python is added instead of replacing what was chosen.
_ADDED = ("observer", "parallel-layer")


def choose_plugins(
    merged: ConfigSource,
    objects: Iterable[object],
    catalog: Catalog,
    findings: Findings,
    notices: list[str],
    kinds: Iterable[str] = RUN_KINDS,
    *,
    plan_only: bool = False,
) -> dict[str, tuple[Plugin, ...]]:
    """The plugins of ``kinds``, which are all that a run chooses unless said, loaded.

    A kind with a problem is left out, and the problem is in ``findings``. With ``plan_only`` a plugin that cannot be
    loaded because there is no engine is represented by a stand-in, unless it is the schedule. So is a file that must
    not be run.
    """
    given = _given(objects, findings)
    digests = SourceDigests()
    chosen: dict[str, tuple[Plugin, ...]] = {}
    for kind in kinds:
        replaced = kind in given and kind not in _ADDED
        choices = () if replaced else merged.choices.get(kind, ())
        plugins = [_load(merged, catalog, kind, choice, digests, findings, notices, plan_only) for choice in choices]
        loaded = (*filter(None, plugins), *given.get(kind, ()))
        if loaded or kind == "observer":
            chosen[kind] = loaded
        elif not choices:
            findings.add(_unchosen(kind))
    return chosen


def check_names(merged: ConfigSource, catalog: Catalog, findings: Findings) -> None:
    """Find the names in ``merged`` that no installed plugin has. Imports none."""
    for kind, choices in merged.choices.items():
        for choice in choices:
            with findings.collect(), suppress(EngineMissingError):  # planning does without the engine's plugins
                choose(catalog, kind, choice.reference, str(choice.origin))


def _given(objects: Iterable[object], findings: Findings) -> dict[str, tuple[Plugin, ...]]:
    given: dict[str, tuple[Plugin, ...]] = {}
    for candidate in objects:
        with findings.collect():
            plugin = from_object(candidate)
            check_run_kind(plugin.kind, str(plugin))
            given[plugin.kind] = (*given.get(plugin.kind, ()), plugin)
            if len(given[plugin.kind]) > 1 and plugin.kind not in _ADDED:
                raise InputError(f"{plugin.kind} is given twice", origin="python", fix="hand in one object")
    return given


def _load(
    merged: ConfigSource,
    catalog: Catalog,
    kind: str,
    choice: Choice,
    digests: SourceDigests,
    findings: Findings,
    notices: list[str],
    plan_only: bool,
) -> Plugin | None:
    """Load the plugin of ``choice``. A default observer that is absent or broken is left out with a notice.

    A default that a rule chose gets a notice, too. The error of a missing plugin names the version that saved the run
    folder, if there is one.
    """
    if choice.origin.source == "default" and choice.origin != DEFAULT:
        notices.append(f"{kind}={choice.reference} is {choice.origin}")
    entry: Entry | None = None
    try:
        if choice.origin.source == "found" and is_file(choice.reference):
            raise _not_typed(kind, choice, merged.choices[kind])
        entry = choose(catalog, kind, choice.reference, str(choice.origin))
        if entry.file and (whose := whose_file(choice.origin, entry.file)):
            notices.append(_code_notice(f"{kind}={entry.name}", entry.file, whose, choice.origin))
        return load(entry, str(choice.origin), digests)
    except PluginError as error:
        absent = plan_only and isinstance(error, EngineMissingError) and kind != "schedule"
        if absent or isinstance(error, FileNotRunError):
            return unloaded(kind, plugin_name(choice.reference), str(choice.origin), entry, error)
        if kind == "observer" and choice.origin == DEFAULT:
            others = ",".join(name for name in DEFAULT_PLUGINS[kind] if name != choice.reference)
            instead = f"to run without it: --set {kind}={others}"
            notices.append(f"{kind}={choice.reference} is left out: {error.what}; {advice(error.fix, instead)}")
        else:
            error.why = error.why or _saved_with(merged, kind, choice.reference)
            findings.add(error)
    return None


def _not_typed(kind: str, choice: Choice, stack: Iterable[Choice]) -> PluginError:
    """The refusal of a file that nobody has typed, with what to type: the ``stack`` where a kind takes several."""
    words = quote(SEPARATORS.get(kind, "").join(each.reference for each in stack))
    return PluginError(
        f"{kind}={choice.reference} is a file and is not run",
        why="a configuration that was found in a folder may not name code",
        origin=str(choice.origin),
        fix=f"if you trust it: --plugin {kind}={words}, in Python sets=[{f'{kind}.use={words}'!r}]",
    )


def rule_notices(merged: ConfigSource) -> Iterator[str]:
    """The notice about the optimizer's rule where that is a file which may not be the user's own."""
    value = merged.values.get(("optimizer", "rule"))
    place = str(value.data).rpartition(":")[0] if value else ""
    if value and is_file(place):
        file = Path(place).expanduser().resolve()
        if whose := whose_file(value.origin, file):
            yield _code_notice("optimizer.rule", file, whose, value.origin)


def _code_notice(what: str, file: Path, whose: str, origin: Origin) -> str:
    return f"{what} is code that runs: {file}, {whose}; named at {origin}"


def whose_file(origin: Origin, file: Path) -> str:
    """Why the ``file`` of code that a configuration names may not be the user's own; empty when it is.

    What the user types, or writes into a configuration of theirs, is their own choice.
    """
    config = config_file(origin)
    if config is not None and run_home(config) is not None:
        return "chosen by a run folder"
    for path in filter(None, (config, file)):
        with suppress(OSError):
            if path.stat().st_uid != os.geteuid():
                return f"and {path} belongs to another user"
    return ""


def _saved_with(merged: ConfigSource, kind: str, reference: str) -> str:
    """``step 300 of runs/mine was saved with acme-zigzag==0.3.0``; empty where nothing was saved with such a plugin.

    A hint, read without the checkpoint code, which is the engine's; the manifest is not verified here.
    """
    folder = merged.values.get(("run", "folder"))
    if folder is None or folder.data is None:
        return ""
    path = Path(str(folder.data)).expanduser()
    steps = [int(each.name[4:]) for each in path.glob("checkpoints/step*") if each.name[4:].isdecimal()]
    try:
        manifest = parse_json(SafeFolder(path).read(f"checkpoints/step{max(steps)}/manifest.json"))
        writers = manifest["manifest"]["about"]["plugins"][kind]
        (writer,) = (writer for writer in writers if writer["name"] == reference.rpartition(":")[2])
        return f"step {max(steps)} of {path} was saved with {writer['distribution']}=={writer['version']}"
    except (OSError, ValueError, LookupError, TypeError):  # nothing saved, damaged, or of another version
        return ""


def _unchosen(kind: str) -> InputError:
    return InputError(
        f"{kind}.use is not set",
        why=f"{kind} is never chosen in silence",
        fix=f"write {kind}.use into the file or add --plugin {kind}=NAME, as data=text,paths=FOLDER or data=mock",
    )


def apply_suggestions(
    merged: ConfigSource, plugins: Mapping[str, tuple[Plugin, ...]], notices: list[str]
) -> ConfigSource:
    """Add the values that plugins suggest for keys that the user left open, with one notice per plugin."""
    suggested = ConfigSource()
    for plugin in (plugin for stack in plugins.values() for plugin in stack):
        fresh = {
            key: value
            for name, value in _wishes(merged, plugin).items()
            if not _is_set(merged, key := tuple(name.split("."))) and key not in suggested.values
        }
        for key, value in fresh.items():
            suggested.put(key, value, Origin("suggestion", f"the suggestion of {plugin}"))
        if fresh:
            wishes = ", ".join(f"{dotted(key)}={value}" for key, value in fresh.items())
            notices.append(f"{plugin} suggests {wishes}")
    return merge((default_source(), suggested, merged))


def _wishes(merged: ConfigSource, plugin: Plugin) -> Mapping[str, Any]:
    """The suggestions of ``plugin`` with the options that it was given."""
    wishes = dict(plugin.info.suggests)
    for condition, more in plugin.info.suggests_with.items():
        option, _, wanted = condition.partition("=")
        key = tuple(option.split("."))
        given, field = merged.values.get((section_of(plugin.kind), *key)), field_at(plugin.options_model, key)
        if typed(given.data if given else field and default_of(field)) == wanted:
            wishes.update(more)
    return wishes


def _is_set(merged: ConfigSource, key: Key) -> bool:
    return any(other[: len(key)] == key[: len(other)] for other in merged.values)


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
        owners = _owners(kind, key, plugins, inherited=value.inherited)
        for name, inner in owners.items():
            owned[name][inner] = value
        if owners or not _reachable(kind, key, plugins, merged):
            continue
        if value.inherited:
            dropped.append(dotted((section, *key)))
        else:
            models, hint = [plugin.options_model for plugin in plugins], _who_has(kind, key, catalog)
            findings.add(unknown_key((section,), key[0], models, value.origin, owner, hint))
    if dropped:
        notices.append(f"{owner} has no {', '.join(dropped)}, written for another {kind}: dropped")
    return tuple(_validated(plugin, owned[plugin.name], findings) for plugin in plugins)


def _owners(kind: str, key: Key, plugins: tuple[Plugin, ...], *, inherited: bool) -> dict[str, Key]:
    """The plugins that an option belongs to, and what it is called there.

    One that lacks a key of a group that it has gets it to say so, unless the key was written for another.
    """
    if kind in SEPARATORS and len(key) > 1 and key[0] in {plugin.name for plugin in plugins}:
        return {key[0]: key[1:]}
    near = [plugin for plugin in plugins if not plugin.loaded or key[0] in fields_of(plugin.options_model)]
    whole = [plugin for plugin in near if not plugin.loaded or knows(plugin.options_model, key)]
    return dict.fromkeys((plugin.name for plugin in (whole if inherited else whole or near)), key)


def _who_has(kind: str, option: Key, catalog: Catalog) -> str:
    """The choice that brings ``option``. For an error only: it loads the first-party plugins that are installed."""
    owners = []
    for entry in catalog.of_kind(kind):
        if known_plugin(kind, entry.name):
            with suppress(PluginError):
                if knows(load(entry, "").options_model, option):
                    owners.append(f"--plugin {entry}")
    return f"choose {' or '.join(owners)}, which has it" if owners else ""


def _reachable(kind: str, key: Key, plugins: tuple[Plugin, ...], merged: ConfigSource) -> bool:
    """False for options of a chosen plugin that could not be loaded, which has its own error or notice."""
    names = {plugin.name for plugin in plugins}
    missing = {choice.reference for choice in merged.choices.get(kind, ())} - names
    return kind not in SEPARATORS or len(key) == 1 or key[0] not in missing


def _validated(plugin: Plugin, values: Mapping[Key, Value], findings: Findings) -> Plugin:
    if not plugin.loaded:
        return plugin.with_options(UncheckedOptions(**unchecked((section_of(plugin.kind),), values, findings)))
    why = f"{plugin} needs it"
    options = validate(plugin.options_model, (section_of(plugin.kind),), values, findings, fix_missing=why)
    return plugin.with_options(options) if options is not None else plugin


def kind_section(kind: str, plugins: tuple[Plugin, ...], merged: ConfigSource) -> PluginSection | PluginsSection:
    """The section of a kind in the resolved configuration: plugins as they were named, options with every default."""
    words = {plugin_name(choice.reference): choice.reference for choice in merged.choices.get(kind, ())}
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
