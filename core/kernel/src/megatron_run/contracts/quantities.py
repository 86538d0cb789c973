"""Quantities with a unit: durations (``90 min``) and spans of a run (``300`` steps, ``2M samples``, ``1%``)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|)")
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
        match = None if isinstance(value, bool) else _DURATION.fullmatch(text)
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
        return {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": _DURATION.pattern}]}


Unit = Literal["steps", "samples", "%"]

_SPAN = re.compile(r"(\d+(?:\.\d+)?)([kMG]?)\s*(steps?|samples?|%|)")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class Span:
    """``amount`` of ``unit``: optimizer steps, samples, or per cent of the whole run."""

    amount: Fraction
    unit: Unit

    @classmethod
    def parse(cls, value: object) -> Span:
        """Parse ``300``, ``"300"``, ``"2M samples"`` (k, M, G) or ``"1%"``. Raises ValueError."""
        if isinstance(value, Span):
            return value
        text = str(value).strip()
        match = None if isinstance(value, bool) else _SPAN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a span: write 300 (steps), '2M samples' or '1%'")
        amount = Fraction(match[1]) * _FACTORS[match[2]]
        unit: Unit = "%" if match[3] == "%" else "samples" if match[3].startswith("sample") else "steps"
        if unit == "%" and (match[2] or amount > 100):
            raise ValueError(f"{text!r} is not a share of the run: write 0% to 100%")
        if unit != "%" and amount.denominator != 1:
            raise ValueError(f"{text!r} is not a whole number of {unit}")
        return cls(amount, unit)

    def samples(self, total_samples: int, global_batch_size: int) -> int:
        """Length in samples, of a run of ``total_samples``; a step is ``global_batch_size`` samples."""
        if self.unit == "%":
            return round(self.amount * total_samples / 100)
        return int(self.amount) * (global_batch_size if self.unit == "steps" else 1)

    def steps(self, total_steps: int, global_batch_size: int) -> int:
        """Length in steps, of a run of ``total_steps``, rounded; at least 1 unless the span is zero."""
        if not self.amount:
            return 0
        if self.unit == "%":
            return max(1, round(self.amount * total_steps / 100))
        return max(1, round(self.amount / (global_batch_size if self.unit == "samples" else 1)))

    def __str__(self) -> str:
        number = str(int(self.amount)) if self.amount.denominator == 1 else str(float(self.amount))
        return number + {"steps": "", "samples": " samples", "%": "%"}[self.unit]

    def __repr__(self) -> str:
        return f"Span({str(self)!r})"

    def written(self) -> int | str:
        """The value in a configuration file: an integer for steps, otherwise text."""
        return int(self.amount) if self.unit == "steps" else str(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        writer = core_schema.plain_serializer_function_ser_schema(cls.written)
        return core_schema.no_info_plain_validator_function(cls.parse, serialization=writer)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        pattern = r"^\d+(\.\d+)?[kMG]?\s*(steps?|samples?|%|)$"
        return {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": pattern}]}
