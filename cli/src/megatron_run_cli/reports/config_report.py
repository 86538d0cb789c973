"""``config show`` and ``config schema``: the resolved configuration with its origins; the JSON schema for editors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from megatron_run.config.origin import DEFAULT, KIND_SECTIONS, Key, Origin, dotted
from megatron_run.config.values import leaves
from megatron_run.config.yaml import yaml_lines
from megatron_run.contracts.plugin import RUN_KINDS, SEPARATORS
from megatron_run.contracts.schema import SECTIONS, Header
from megatron_run.planning.run import sections
from megatron_run.registry.loaded_plugin import Plugin

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun


def show(run: ResolvedRun) -> str:
    """The resolved configuration as YAML, each key with its origin as a comment."""
    lines = [(text, None if key is None else _origin(run, key)) for text, key in yaml_lines(sections(run))]
    width = max(len(text) for text, _ in lines)
    return "".join(f"{text:{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines)


def show_json(run: ResolvedRun) -> dict[str, Any]:
    """The text of :func:`show` as data: dotted key -> value, origin and layer."""
    found: dict[str, Any] = {}
    for key, value in leaves(sections(run)):
        origin = _origin(run, key)
        found[dotted(key)] = {"value": value, "origin": str(origin), "layer": origin.source}
    return found


def _origin(run: ResolvedRun, key: Key) -> Origin:
    """Where a key came from; an option of one of several plugins may have been written for all of them."""
    several = len(key) > 2 and KIND_SECTIONS.get(key[0]) in SEPARATORS
    candidates = (key, (key[0], *key[2:])) if several else (key,)
    known = [key[:end] for key in candidates for end in range(len(key), 1, -1)]
    return next((run.origins[each] for each in known if each in run.origins), DEFAULT)


def json_schema(plugins: Iterable[Plugin]) -> dict[str, Any]:
    """The JSON schema of a configuration that may use any of ``plugins``."""
    options: dict[str, dict[str, type[BaseModel]]] = {kind: {} for kind in RUN_KINDS}
    for plugin in plugins:
        options[plugin.kind][plugin.name] = plugin.options_model
    definitions: dict[str, Any] = {}
    properties: dict[str, Any] = dict(Header.model_json_schema()["properties"])
    for name, model in SECTIONS.items():
        properties[name] = _inlined(model, definitions, name)
        properties[name].pop("required", None)  # several files make one configuration
    for section, kind in KIND_SECTIONS.items():
        for spelling in dict.fromkeys((kind, section)):
            properties[spelling] = _kind_schema(kind, options[kind], definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "megatron-run configuration",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": definitions,
    }


def _kind_schema(kind: str, plugins: Mapping[str, type[BaseModel]], definitions: dict[str, Any]) -> dict[str, Any]:
    """A plugin's name, or a section with ``use`` and the options of whichever plugin is in use."""
    use: dict[str, Any] = {"type": "string"}
    if plugins:
        use["examples"] = list(plugins)
    if kind in SEPARATORS:
        use = {"anyOf": [use, {"type": "array", "items": use}]}
    properties: dict[str, Any] = {"use": use}
    for name, model in plugins.items():
        own = _inlined(model, definitions, f"{kind}={name}")
        for key, schema in own.get("properties", {}).items():
            described = {**schema, "title": f"{kind}={name}: {key}"}
            properties[key] = {"anyOf": [properties[key], described]} if key in properties else described
        if kind in SEPARATORS:
            properties[name] = own
    return {"anyOf": [use, {"type": "object", "properties": properties, "additionalProperties": not plugins}]}


def _inlined(model: type[BaseModel], definitions: dict[str, Any], owner: str) -> dict[str, Any]:
    """The model's schema; models inside it move to the common definitions, where groups of two owners may be alike."""
    schema = model.model_json_schema(ref_template=f"#/$defs/{owner}.{{model}}")
    definitions.update({f"{owner}.{name}": inner for name, inner in schema.pop("$defs", {}).items()})
    return schema
