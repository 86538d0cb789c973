"""Writes plain data as YAML 1.2 that reads back as the same data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from megatron_run.config.origin import KIND_SECTIONS, Key
from megatron_run.config.values import core_scalar

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
