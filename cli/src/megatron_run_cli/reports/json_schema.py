"""``config schema``: the JSON schema of a configuration file, for editors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from megatron_run.config.merge import SEPARATORS
from megatron_run.config.origin import KIND_SECTIONS
from megatron_run.contracts.plugin import RUN_KINDS
from megatron_run.contracts.schema import SECTIONS, Header
from megatron_run.registry.loaded_plugin import Plugin


def json_schema(plugins: Iterable[Plugin]) -> dict[str, Any]:
    """The JSON schema of a configuration that may use any of ``plugins``."""
    options: dict[str, dict[str, type[BaseModel]]] = {kind: {} for kind in RUN_KINDS}
    for plugin in plugins:
        options[plugin.kind][plugin.name] = plugin.options_model
    definitions: dict[str, Any] = {}
    properties: dict[str, Any] = dict(Header.model_json_schema()["properties"])
    for name, model in SECTIONS.items():
        properties[name] = _inlined(model, definitions)
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
        own = _inlined(model, definitions)
        for key, schema in own.get("properties", {}).items():
            described = {**schema, "title": f"{kind}={name}: {key}"}
            properties[key] = {"anyOf": [properties[key], described]} if key in properties else described
        if kind in SEPARATORS:
            properties[name] = own
    return {"anyOf": [use, {"type": "object", "properties": properties, "additionalProperties": not plugins}]}


def _inlined(model: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    """The model's schema; models inside it move to the common definitions."""
    schema = model.model_json_schema()
    definitions.update(schema.pop("$defs", {}))
    return schema
