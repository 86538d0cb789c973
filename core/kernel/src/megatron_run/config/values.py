"""Values: text read by the type of its field, and Python values as plain data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from enum import Enum
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from megatron_run.contracts.quantities import Duration, Span

#: The scalars of YAML 1.2's core schema. No timestamps, no `yes` and `no`, no numbers with `_`.
_CONSTANTS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_LONGEST = 64  # characters of a number; Python refuses to read integers of more than 4300 digits


def core_scalar(text: str) -> int | float | bool | str | None:
    """Read a scalar as YAML 1.2 does: ``1e-4`` is a number, ``no`` a string.

    A whole number is an int however it is written (``1e6``, ``2.0``), since samples are counted in millions.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if len(text) > _LONGEST:
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return whole(float(text))
    special = _SPECIAL.fullmatch(text)
    if special:
        return float("nan") if special[3] else float(f"{special[1]}inf")
    return text


def whole(number: float) -> int | float:
    """The same number as an int where it is one, up to the last float that counts exactly (2^53)."""
    return int(number) if abs(number) <= 2**53 and number == int(number) else number


def plain(value: object) -> Any:
    """Convert a Python value to JSON types. Raises TypeError for anything else."""
    if isinstance(value, Span):
        return value.written()
    if isinstance(value, Duration):
        return str(value)
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return whole(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes):
        return [plain(each) for each in value]
    raise TypeError(f"{type(value).__name__} cannot be written into a configuration")


def typed(value: object) -> str:
    """A value as the command line takes it: ``true``, ``null``, lists split at commas."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list | set | frozenset):
        return ",".join(typed(item) for item in value)
    return str(value)


def leaves(data: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key of nested mappings with its value, in order; an empty mapping is a value."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """``{"model": {"use": "gpt"}}`` as ``{"model.use": "gpt"}``; an empty mapping is a value."""
    return {".".join(key): value for key, value in leaves(data)}


def nested(data: Mapping[str, Any]) -> dict[str, Any]:
    """``{"model.use": "gpt"}`` as ``{"model": {"use": "gpt"}}``; what is nested already is merged with it."""
    found: dict[str, Any] = {}
    for key, value in leaves(data):
        inner = found
        *groups, name = ".".join(key).split(".")
        for each in groups:
            inner = inner.setdefault(each, {})
        inner[name] = value
    return found


def read_text(text: str, annotation: object) -> Any:
    """Read ``text`` as a value of type ``annotation``: text and paths verbatim, lists split at commas, else a scalar.

    ``null`` is None where the type allows it. The model's own validation decides whether the value is valid.
    """
    types = members(annotation)
    if text == "null" and NoneType in types:
        return None
    if any(_is_verbatim(member) or text in _literals(member) for member in types):
        return str(text)
    for member in types:
        items = _items(member)
        if items:
            parts = [part.strip() for part in text.split(",")] if text else []
            return [read_text(part, items[min(index, len(items) - 1)]) for index, part in enumerate(parts)]
    return core_scalar(text)


def members(annotation: object) -> tuple[Any, ...]:
    """The alternatives of a type: unions flattened, Annotated stripped."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return tuple(member for each in get_args(annotation) for member in members(each))
    return (annotation,)


def _is_verbatim(member: Any) -> bool:
    return (
        isinstance(member, type)
        and issubclass(member, str | PurePath | Span | Duration)
        and not issubclass(member, Enum)
    )


def _literals(member: Any) -> tuple[Any, ...]:
    if isinstance(member, type) and issubclass(member, Enum):
        return tuple(each.value for each in member)
    return get_args(member) if get_origin(member) is Literal else ()


def _items(member: Any) -> tuple[Any, ...]:
    """The types of a sequence's items, the last repeated; empty when ``member`` is no sequence."""
    origin = get_origin(member) or member
    if not isinstance(origin, type) or not issubclass(origin, Sequence | Set) or issubclass(origin, str | bytes):
        return ()
    arguments = tuple(each for each in get_args(member) if each is not Ellipsis)
    return arguments or (object,)
