"""From the merged configuration to loaded plugins: scan, choose, import the chosen ones and no other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_run.config.defaults import default_layer
from megatron_run.config.layers import Layer, merge
from megatron_run.config.origin import DEFAULT, Choice, Key, Origin, dotted, section_of
from megatron_run.config.problems import Findings
from megatron_run.contracts.plugin import RUN_KINDS, check_run_kind
from megatron_run.errors import InputError, PluginError
from megatron_run.planning.saved import saved_with
from megatron_run.registry.choose import choose
from megatron_run.registry.describe import typed
from megatron_run.registry.digest import SourceDigests
from megatron_run.registry.discover import Catalog
from megatron_run.registry.load import Plugin, load
from megatron_run.registry.objects import from_object

#: Kinds to which a plugin handed in from Python is added instead of replacing what was chosen.
_ADDED = ("observer", "parallel-layer")


def choose_plugins(
    layer: Layer,
    objects: Iterable[object],
    catalog: Catalog,
    findings: Findings,
    notices: list[str],
    kinds: Iterable[str] = RUN_KINDS,
) -> dict[str, tuple[Plugin, ...]]:
    """The plugins of ``kinds``, which are all that a run chooses unless said, loaded.

    A kind with a problem is left out, and the problem is in ``findings``.
    """
    given = _given(objects, findings)
    digests = SourceDigests()
    chosen: dict[str, tuple[Plugin, ...]] = {}
    for kind in kinds:
        replaced = kind in given and kind not in _ADDED
        choices = () if replaced else layer.choices.get(kind, ())
        plugins = [_load(layer, catalog, kind, choice, digests, findings, notices) for choice in choices]
        loaded = (*filter(None, plugins), *given.get(kind, ()))
        if loaded or kind == "observer":
            chosen[kind] = loaded
        elif not choices:
            findings.add(_unchosen(kind))
    return chosen


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
    layer: Layer,
    catalog: Catalog,
    kind: str,
    choice: Choice,
    digests: SourceDigests,
    findings: Findings,
    notices: list[str],
) -> Plugin | None:
    """The plugin of ``choice``; an observer that nobody asked for may be absent or broken, which is a notice.

    So is a plugin that nobody chose and that is not the usual default. Of one that is missing it is said with which
    version the run folder was saved.
    """
    if choice.origin.layer == "default" and choice.origin != DEFAULT:
        notices.append(f"{kind}={choice.word} is {choice.origin}")
    try:
        return load(choose(catalog, kind, choice.word, str(choice.origin)), str(choice.origin), digests)
    except PluginError as error:
        if kind == "observer" and choice.origin == DEFAULT:
            notices.append(f"{kind}={choice.word} is left out: {error.what}{'; ' + error.fix if error.fix else ''}")
        else:
            error.why = error.why or saved_with(layer, kind, choice.word)
            findings.add(error)
    return None


def _unchosen(kind: str) -> InputError:
    return InputError(
        f"{kind}.use is not set",
        why=f"{kind} is never chosen in silence",
        fix=f"write {kind}.use into the file or add --plugin {kind}=NAME, as data=text,paths=FOLDER or data=mock",
    )


def apply_suggestions(layer: Layer, plugins: Mapping[str, tuple[Plugin, ...]], notices: list[str]) -> Layer:
    """``layer`` with the values that plugins would like where nobody said anything, each plugin's in one notice."""
    suggested = Layer()
    for plugin in (plugin for many in plugins.values() for plugin in many):
        fresh = {
            key: value
            for name, value in _wishes(layer, plugin).items()
            if not _is_set(layer, key := tuple(name.split("."))) and key not in suggested.values
        }
        for key, value in fresh.items():
            suggested.put(key, value, Origin("suggestion", f"the suggestion of {plugin}"))
        if fresh:
            wishes = ", ".join(f"{dotted(key)}={value}" for key, value in fresh.items())
            notices.append(f"{plugin} suggests {wishes}")
    return merge((default_layer(), suggested, layer))


def _wishes(layer: Layer, plugin: Plugin) -> Mapping[str, Any]:
    """What ``plugin`` suggests with the options that it was given."""
    wishes = dict(plugin.info.suggests)
    for condition, more in plugin.info.suggests_with.items():
        option, _, wanted = condition.partition("=")
        given = layer.values.get((section_of(plugin.kind), option))
        field = plugin.options_model.model_fields.get(option)
        if typed(given.data if given else field and field.default) == wanted:
            wishes.update(more)
    return wishes


def _is_set(layer: Layer, key: Key) -> bool:
    return any(other[: len(key)] == key[: len(other)] for other in layer.values)
