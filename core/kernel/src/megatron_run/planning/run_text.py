"""A resolved run as text: what a launcher hands to its ranks, which take it over as it was resolved.

A rank reads no source, and merges, chooses, suggests, plans and asks nothing: it imports the plugins that are named and
fills the frozen models of configuration and options from their values. That is cheaper than any other way to hand over
a model: 0.15 ms of the 85 ms in which ``preset:laptop`` is resolved. Taking it over takes 40 ms, nearly all of it for
the digest of the plugins' sources, which a rank must take itself, to compare what it has imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_run.config.origin import Origin
from megatron_run.config.request import Request
from megatron_run.contracts.schedule import Action, Place
from megatron_run.contracts.schema import Config
from megatron_run.contracts.topology import Sizes
from megatron_run.errors import PluginError
from megatron_run.pipeline.plan import Plan
from megatron_run.planning.choosing import dumped
from megatron_run.planning.run import ResolvedRun
from megatron_run.registry.discover import Entry, SourceDigests
from megatron_run.registry.hooks import in_one_line
from megatron_run.registry.load import from_object, load

if TYPE_CHECKING:
    from megatron_run.registry.loaded_plugin import Plugin


def hand_over(run: ResolvedRun) -> str:
    """``run`` as one line of JSON. A plugin that a program handed in is named; who takes the run over must have it.

    Raises :class:`PluginError` for options that are not read as they are written.
    """
    plans = {count: {name: getattr(plan, name) for name in _OF_PLAN} for count, plan in run.plans.items()}
    return json.dumps(
        {
            "config": run.config.model_dump(mode="json"),
            "plugins": {kind: [_record(plugin) for plugin in stack] for kind, stack in run.plugins.items()},
            "sizes": asdict(run.sizes),
            "layout": [(stage, chunk, layers.start, layers.stop) for stage, chunk, layers in run.layout],
            "plans": plans,
            "origins": [(key, asdict(origin)) for key, origin in run.origins.items()],
            "notices": run.notices,
            "request": run.request.to_json(),
        }
    )


def take_over(text: str, objects: Iterable[object] = ()) -> ResolvedRun:
    """The run of which :func:`hand_over` made ``text``; ``objects`` are the plugins that a program handed in.

    Raises :class:`PluginError` for a plugin that cannot be imported here, or has changed since.
    """
    handed = json.loads(text)
    given, digests = [from_object(each) for each in objects], SourceDigests()
    layout = tuple(Place(stage, chunk, range(start, stop)) for stage, chunk, start, stop in handed["layout"])
    plugins = {
        kind: tuple(_plugin(record, given, digests) for record in stack) for kind, stack in handed["plugins"].items()
    }
    return ResolvedRun(
        config=Config.model_validate_json(json.dumps(handed["config"]), strict=True),
        plugins=MappingProxyType(plugins),
        sizes=Sizes(**handed["sizes"]),
        layout=layout,
        plans=MappingProxyType({int(count): _plan(layout, plan) for count, plan in handed["plans"].items()}),
        origins=MappingProxyType({tuple(key): Origin(**origin) for key, origin in handed["origins"]}),
        notices=tuple(handed["notices"]),
        request=Request.from_json(handed["request"]),
    )


def _record(plugin: Plugin) -> Mapping[str, Any]:
    return {
        "kind": plugin.kind,
        "name": plugin.name,
        "origin": plugin.origin,
        "entry": None if plugin.entry is None else asdict(plugin.entry),
        "digest": plugin.digest,
        "options": None if plugin.options is None else _written(plugin),
    }


def _written(plugin: Plugin) -> Mapping[str, Any]:
    """The options of ``plugin`` as plain data, of which a rank makes the same ones. Raises :class:`PluginError`."""
    written = dumped(plugin)
    try:
        read = plugin.options_model.model_validate_json(json.dumps(written))
    except (TypeError, ValueError) as cause:
        raise plugin.failed("writing its options as JSON and reading them again", in_one_line(cause)) from cause
    if read != plugin.options:
        fix = "let each option be read as it is written: no SecretStr, no exclude=True, tuples by their type"
        why = f"what is written as JSON is read as {read!r}"
        raise PluginError(f"the options of {plugin} cannot be handed to ranks", why=why, origin=plugin.origin, fix=fix)
    return written


def _plugin(record: Mapping[str, Any], given: Iterable[Plugin], digests: SourceDigests) -> Plugin:
    if record["entry"] is not None:
        plugin = load(Entry(**record["entry"]), record["origin"], digests)
    else:
        plugin = _handed_in(record, given)
    if plugin.digest != record["digest"]:
        why = "its sources are not those with which the run was resolved"
        raise PluginError(f"{plugin} has changed", why=why, origin=plugin.origin, fix="start the run again")
    if record["options"] is None:
        return plugin
    return plugin.with_options(plugin.options_model.model_validate_json(json.dumps(record["options"])))


def _handed_in(record: Mapping[str, Any], given: Iterable[Plugin]) -> Plugin:
    for plugin in given:
        if (plugin.kind, plugin.name) == (record["kind"], record["name"]):
            return plugin
    raise PluginError(
        f"{record['kind']}={record['name']} is not here",
        why="it is an object of the program that resolved the run",
        fix="write the plugin into a file and name the file",
    )


#: The fields of a plan besides its layout, which is the run's.
_OF_PLAN = tuple(each.name for each in fields(Plan) if each.name != "layout")


def _plan(layout: tuple[Place, ...], plan: Mapping[str, Any]) -> Plan:
    lists = tuple(tuple(Action(*action) for action in actions) for actions in plan["lists"])
    return Plan(layout=layout, **{**{name: _tuples(value) for name, value in plan.items()}, "lists": lists})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
