"""A length of time: ``45 s``, ``90 min`` or ``11.5 h``; a bare number is seconds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|)")
_UNITS = MappingProxyType({"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400})


@dataclass(frozen=True)
class Duration:
    """A duration of ``seconds``, written as ``text``."""

    seconds: float
    text: str

    @classmethod
    def parse(cls, value: object) -> Duration:
        """Parse ``"90 min"``, ``"11.5h"`` or ``3600``. Raises ValueError."""
        if isinstance(value, Duration):
            return value
        text = str(value).strip()
        match = None if isinstance(value, bool) else _TEXT.fullmatch(text)
        if match is None or not float(match[1]):
            raise ValueError(f"{text!r} is not a length of time: write 45 s, 90 min, 11.5 h or 2 d")
        return cls(float(match[1]) * _UNITS[match[2]], text)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        writer = core_schema.plain_serializer_function_ser_schema(str)
        return core_schema.no_info_plain_validator_function(cls.parse, serialization=writer)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": _TEXT.pattern}]}
