"""Reads YAML 1.2 and JSON as plain data, every key with its line and column, and writes plain data as YAML 1.2.

Only the event parser of ruamel.yaml is used: no object is constructed from a tag, and the limits on size, depth and
expanded aliases apply while the text is read. ruamel's composer would build the whole tree before any limit applies,
and its nodes do not tell where an alias stood. What is written reads back as the same data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, StringMark
from ruamel.yaml.events import (
    AliasEvent,
    DocumentEndEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
    StreamStartEvent,
)
from ruamel.yaml.reader import ReaderError

from megatron_run.config.origin import KIND_SECTIONS, Key, Origin
from megatron_run.config.values import core_scalar
from megatron_run.errors import InputError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
MAX_VALUES = 10_000


@dataclass(frozen=True)
class Node:
    """A value and the position of its key. The data of a mapping is a dict of nodes; anything else is plain data."""

    data: Any
    origin: Origin


def parse(text: str, name: str) -> dict[str, Node]:
    """The mapping that ``text`` holds; ``name`` is the file's, for messages. An empty text is an empty mapping.

    Raises :class:`InputError` of the form ``name:line:column: what``.
    """
    if len(text) > MAX_BYTES:
        raise too_large(name, len(text))
    for number, line in enumerate(text.splitlines()):
        if line.startswith("%"):
            raise _refusal(name, number, 0, f"the directive {line.split()[0]!r}", "YAML 1.2 is read without directives")
        if line.strip() and not line.startswith("#"):
            break
    if name.endswith(".json"):
        text = text.replace("\t", " ")  # JSON may be indented by tabs, and has none inside its strings
    try:
        return _Builder(text, name).document()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _refusal(name, mark.line, mark.column, "YAML that cannot be read", _reason(error)) from None
    except ReaderError as error:
        before = text[: error.position]
        row, column = before.count("\n"), len(before) - before.rfind("\n") - 1
        if "\udc80" <= text[error.position] <= "\udcff":  # as Python decodes it of standard input
            raise InputError(f"{name}:{row + 1}:{column + 1}: a byte that is not UTF-8 is refused") from None
        raise _refusal(name, row, column, f"the character {text[error.position]!r}", "it is not printable") from None


def _reason(error: MarkedYAMLError) -> str:
    if "'\\t'" in str(error.problem):
        return "a tab; indent with spaces"
    return ", ".join(str(part) for part in (error.context, error.problem) if part)


def too_large(name: str, size: int) -> InputError:
    """The error of a configuration of ``size`` bytes, which is more than :data:`MAX_BYTES`."""
    what = f"a configuration of {size / 2**20:.1f} MiB"
    return _refusal(name, 0, 0, what, f"at most {MAX_BYTES // 1024} KiB are read")


def _refusal(name: str, line: int, column: int, what: str, why: str) -> InputError:
    return InputError(f"{name}:{line + 1}:{column + 1}: {what} is refused", why=why)


class _Builder:
    """Builds data from the parser's events; ``_values`` counts what was built, with aliases expanded."""

    def __init__(self, text: str, name: str) -> None:
        self._events: Iterator[Event] = iter(YAML(typ="safe", pure=True).parse(text))
        self._name = name
        self._anchors: dict[str, tuple[Node, int]] = {}
        self._values = 0

    def document(self) -> dict[str, Node]:
        data: dict[str, Node] = {}
        documents = 0
        for event in self._events:
            if isinstance(event, StreamStartEvent | StreamEndEvent | DocumentEndEvent):
                continue
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self._refuse(event, "a second document", "a configuration is one document")
                continue
            node = self._value(event, self._origin(event), 0)
            if node.data is not None and not isinstance(node.data, dict):
                raise self._refuse(event, "this configuration", "it is not a mapping of sections, as `train:`")
            data = node.data or {}
        return data

    def _value(self, event: Any, origin: Origin, depth: int) -> Node:
        """The value that starts with ``event``; its origin is its key's."""
        self._check(event, depth)
        before = self._values
        self._values += 1
        if isinstance(event, AliasEvent):
            return self._alias(event, origin)
        if isinstance(event, MappingStartEvent):
            node = Node(self._mapping(depth), origin)
        elif isinstance(event, SequenceStartEvent):
            node = Node(self._sequence(depth), origin)
        else:
            node = Node(event.value if event.style else core_scalar(event.value), origin)
        if event.anchor:
            self._anchors[event.anchor] = node, self._values - before
        return node

    def _mapping(self, depth: int) -> dict[str, Node]:
        found: dict[str, Node] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            if not isinstance(event, ScalarEvent) or not event.value:
                raise self._refuse(event, "a key that is no text", "a key is a single word")
            self._check(event, depth)
            key = event.value
            if key in found:
                raise self._refuse(event, f"the duplicate key {key!r}", f"it stands on line {lines[key] + 1} already")
            lines[key] = event.start_mark.line
            found[key] = self._value(next(self._events), self._origin(event), depth + 1)
        return found

    def _sequence(self, depth: int) -> list[Any]:
        found = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            found.append(bare(self._value(event, self._origin(event), depth + 1)))
        return found

    def _alias(self, event: AliasEvent, origin: Origin) -> Node:
        if event.anchor not in self._anchors:
            raise self._refuse(event, f"the alias *{event.anchor}", "no anchor of that name ends before it")
        node, values = self._anchors[event.anchor]
        self._values += values
        self._check(event, 0)
        return Node(node.data, origin)

    def _check(self, event: Event, depth: int) -> None:
        if self._values >= MAX_VALUES:
            raise self._refuse(event, "this configuration", f"it holds more than {MAX_VALUES} values, aliases followed")
        if depth > MAX_DEPTH:
            raise self._refuse(event, "this configuration", f"it is nested deeper than {MAX_DEPTH}")
        tag = getattr(event, "tag", None)
        if tag is not None:
            short = str(tag).replace("tag:yaml.org,2002:", "!!")
            raise self._refuse(event, f"the tag {short!r}", "a configuration holds plain data")

    def _origin(self, event: Event) -> Origin:
        mark: StringMark = event.start_mark
        return Origin("file", f"{self._name} line {mark.line + 1} column {mark.column + 1}")

    def _refuse(self, event: Event, what: str, why: str) -> InputError:
        return _refusal(self._name, event.start_mark.line, event.start_mark.column, what, why)


def bare(node: Node) -> Any:
    """The data of a node without origins."""
    if isinstance(node.data, dict):
        return {key: bare(each) for key, each in node.data.items()}
    return node.data


_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./:-]*(?<!:)")
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")


def flow(value: Any) -> str:
    """Plain data on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalar(str(key))}: {flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(flow, value))}]"
    return scalar(value)


def scalar(value: Any) -> str:
    """A scalar that YAML 1.2 reads back as itself; text is quoted as JSON wherever it could be taken for more."""
    if isinstance(value, float) and not isfinite(value):
        return str(value).replace("nan", ".nan").replace("inf", ".inf")
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and core_scalar(value) == value:
        return value
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def yaml_text(sections: Mapping[str, Any]) -> str:
    """Sections of plain data as a file that reads back as the same."""
    return "".join(f"{line}\n" for line, _ in yaml_lines(sections))


def yaml_lines(data: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[str, Key | None]]:
    """The lines of nested mappings, each with the key whose value it holds, None for the head of a mapping."""
    indent = "  " * len(prefix)
    for name, value in data.items():
        written = f"{indent}{scalar(name if prefix else KIND_SECTIONS.get(name, name))}:"
        if isinstance(value, Mapping) and value:
            yield written, None
            yield from yaml_lines(value, (*prefix, name))
        else:
            yield f"{written} {flow(value)}", (*prefix, name)
