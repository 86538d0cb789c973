"""What a key means, from the models themselves; and the JSON schema of the whole configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_run.config.defaults import default_text
from megatron_run.config.layers import SEPARATORS
from megatron_run.config.origin import KIND_SECTIONS, Key, dotted
from megatron_run.config.validate import fields_of, submodel
from megatron_run.config.values import members, plain
from megatron_run.contracts.duration import Duration
from megatron_run.contracts.schema import SECTIONS, Header
from megatron_run.contracts.span import Span

_BOUNDS = {
    "gt": "above {}",
    "ge": "at least {}",
    "lt": "below {}",
    "le": "at most {}",
    "multiple_of": "a multiple of {}",
}
_NAMES: Mapping[type, str] = {
    int: "int",
    float: "number",
    bool: "true or false",
    str: "text",
    Span: "span",
    Duration: "time",
}


@dataclass(frozen=True)
class KeyInfo:
    """One key: its type and bounds in words, its default as it would be written, what it means, whose it is."""

    key: Key
    type: str
    default: str
    meaning: str
    bounds: str = ""
    owner: str = ""

    @property
    def name(self) -> str:
        """The key as it is written."""
        return dotted(self.key)

    def __str__(self) -> str:
        rows = {
            "type": self.type + (f", {self.bounds}" if self.bounds else ""),
            "default": self.default,
            "meaning": self.meaning,
            "option of": self.owner,
        }
        return "\n".join([self.name, *(f"  {name:10} {text}" for name, text in rows.items() if text)])


def kernel_keys() -> Iterator[KeyInfo]:
    """Every key that belongs to the kernel, and each kind's ``use``, in the order of the sections."""
    yield from model_keys(Header, ())
    for name, model in SECTIONS.items():
        yield from model_keys(model, (name,))
    for section, kind in KIND_SECTIONS.items():
        several = f"names of plugins, separated by {SEPARATORS[kind]}" if kind in SEPARATORS else "name of a plugin"
        default = default_text(kind) or "required"
        yield KeyInfo((section, "use"), several, default, "NAME, DIST:NAME or a file ./mine.py")


def model_keys(model: type[BaseModel], prefix: Key, owner: str = "") -> Iterator[KeyInfo]:
    """Every key of ``model``, and of the models inside it."""
    for name, field in fields_of(model).items():
        key = (*prefix, name)
        yield KeyInfo(key, type_text(field.annotation), _default(field), field.description or "", _bounds(field), owner)
        inner = submodel(field.annotation)
        if inner is not None:
            yield from model_keys(inner, key, owner)


def type_text(annotation: object) -> str:
    """A type in words: ``one of auto, cpu, cuda``, ``list of int``."""
    words = [_word(member) for member in members(annotation) if member is not NoneType]
    return " or ".join(dict.fromkeys(words))


def _word(member: Any) -> str:
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
    if isinstance(outer, type) and issubclass(outer, Sequence) and outer is not str:
        items = [type_text(each) for each in get_args(member) if each is not Ellipsis]
        return f"list of {' or '.join(dict.fromkeys(items)) or 'any'}"
    return _NAMES.get(member, getattr(member, "__name__", str(member)))


def _bounds(field: FieldInfo) -> str:
    found = []
    for rule in field.metadata:
        found += [text.format(getattr(rule, name)) for name, text in _BOUNDS.items() if hasattr(rule, name)]
    return ", ".join(found)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    data = plain(value)
    return data if isinstance(data, str) and data else "unset" if data is None else json.dumps(data)


def json_schema(options: Mapping[str, Mapping[str, type[BaseModel]]]) -> dict[str, Any]:
    """The JSON schema of a configuration file. ``options`` are the options models by kind and plugin name."""
    definitions: dict[str, Any] = {}
    properties: dict[str, Any] = dict(Header.model_json_schema()["properties"])
    for name, model in SECTIONS.items():
        properties[name] = _inlined(model, definitions)
        properties[name].pop("required", None)  # several files make one configuration
    for section, kind in KIND_SECTIONS.items():
        for spelling in dict.fromkeys((kind, section)):
            properties[spelling] = _kind_schema(kind, options.get(kind, {}), definitions)
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
