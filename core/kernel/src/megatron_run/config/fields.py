"""The fields of the models that describe a configuration, by the keys that a user writes; groups are models inside."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_run.config.origin import Key
from megatron_run.config.values import members
from megatron_run.contracts.meaning import SAME_COMPUTATION, Meaning


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The model's fields by the name a configuration writes."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def submodel(annotation: object) -> type[BaseModel] | None:
    """The model among the types of a field, if there is one."""
    models = (kind for kind in members(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel))
    return next(models, None)


def group_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a group of keys and nothing else: it always has some, and is no value itself."""
    return None if NoneType in members(field.annotation) else submodel(field.annotation)


def walk(model: type[BaseModel], prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Every field of ``model`` with its key, those of models inside it after their own; a group itself is none."""
    for name, field in fields_of(model).items():
        if group_of(field) is None:
            yield (*prefix, name), field
        if inner := submodel(field.annotation):
            yield from walk(inner, (*prefix, name))


def field_at(model: type[BaseModel], key: Key) -> FieldInfo | None:
    """The field that has ``key``; None where there is none, or only a group."""
    return next((field for each, field in walk(model) if each == key), None)


def meanings(field: FieldInfo) -> frozenset[Meaning]:
    """The marks of a field."""
    return frozenset(each for each in field.metadata if isinstance(each, Meaning))


def computes_the_same(field: FieldInfo) -> bool:
    """Whether another value changes nothing that the same weights compute."""
    return bool(meanings(field) & SAME_COMPUTATION)


def groups_with_defaults(model: type[BaseModel]) -> Iterator[str]:
    """The groups of ``model`` whose default is not that of their own fields: one key that is set changes the others."""
    for name, field in fields_of(model).items():
        if (group := group_of(field)) is None:
            continue
        try:
            own = group()
        except ValueError:  # a field without a default
            own = None
        if not field.is_required() and default_of(field) != own:
            yield name
        yield from (f"{name}.{inner}" for inner in groups_with_defaults(group))


def default_of(field: FieldInfo) -> Any:
    """The default of a field that is not required."""
    return field.get_default(call_default_factory=True)
