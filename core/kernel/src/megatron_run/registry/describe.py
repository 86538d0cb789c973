"""What a plugin says about itself, as plain data that can be printed or sent through a pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_run.config.explain import type_text
from megatron_run.registry.plugin import Plugin

#: Attributes of a field's constraints, and how a bound is written.
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of", "min_length": "length >="}


@dataclass(frozen=True)
class OptionRow:
    """One option of a plugin; ``default`` is as one would type it, None when the option must be set."""

    name: str
    type: str
    default: str | None
    bounds: str
    description: str


@dataclass(frozen=True)
class Description:
    """A plugin that was imported, described: where from, what it provides and wants, its options."""

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
    options: tuple[OptionRow, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Description:
        """Read the form that ``dataclasses.asdict`` writes, after a trip through JSON."""
        words = {field: tuple(data[field]) for field in ("provides", "requires", "conflicts")}
        return cls(**{**data, **words, "options": tuple(OptionRow(**row) for row in data["options"])})


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
        options=describe_options(plugin.options_model),
    )


def _typed_values(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: typed(value) for key, value in values.items()}


def describe_options(model: type[BaseModel]) -> tuple[OptionRow, ...]:
    """The fields of an options model, in the order in which it declares them."""
    return tuple(_row(name, field) for name, field in model.model_fields.items())


def typed(value: object) -> str:
    """A value as one would type it: ``true``, ``null``, lists split at commas."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list | set | frozenset):
        return ",".join(typed(item) for item in value)
    return str(value)


def _row(name: str, field: FieldInfo) -> OptionRow:
    default = None if field.is_required() else typed(field.get_default(call_default_factory=True))
    bounds = [
        f"{sign} {getattr(constraint, attribute)}"
        for constraint in field.metadata
        for attribute, sign in _BOUNDS.items()
        if getattr(constraint, attribute, None) is not None
    ]
    return OptionRow(name, type_text(field.annotation), default, ", ".join(bounds), field.description or "")
