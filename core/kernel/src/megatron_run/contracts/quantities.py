"""Quantities with a unit: durations (``90 min``) and spans of a run (``300`` steps, ``2M samples``, ``1%``)."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


class _Quantity(ABC):
    """A number with a unit, which a configuration holds as text or, without its unit, as a number."""

    __slots__ = ()
    #: How it is written, and what a message says about text that is not.
    _pattern: ClassVar[re.Pattern[str]]
    _wanted: ClassVar[str]

    @classmethod
    def parse(cls, value: object) -> Self:
        """Parse text or a number; a quantity stays as it is. Raises ValueError."""
        if isinstance(value, cls):
            return value
        text = str(value).strip()
        # True and False are numbers to Python, and a mistake in a file.
        match = None if isinstance(value, bool) else cls._pattern.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not {cls._wanted}")
        return cls._of(match, text)

    @classmethod
    @abstractmethod
    def _of(cls, match: re.Match[str], text: str) -> Self:
        """The quantity that ``text`` stands for. Raises ValueError."""

    def written(self) -> int | str:
        """The value in a configuration file."""
        return str(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        writer = core_schema.plain_serializer_function_ser_schema(cls.written)
        return core_schema.no_info_plain_validator_function(cls.parse, serialization=writer)


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|)")
_UNITS = MappingProxyType({"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400})


@dataclass(frozen=True)
class Duration(_Quantity):
    """A duration of ``seconds``, written as ``text``: ``"90 min"``, ``"11.5h"`` or ``3600``."""

    seconds: float
    text: str

    _pattern = _DURATION
    _wanted = "a length of time: write 45 s, 90 min, 11.5 h or 2 d"

    @classmethod
    def _of(cls, match: re.Match[str], text: str) -> Self:
        if not float(match[1]):
            raise ValueError(f"{text!r} is not {cls._wanted}")
        return cls(float(match[1]) * _UNITS[match[2]], text)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": _DURATION.pattern}]}


Unit = Literal["steps", "samples", "%"]

_SPAN = re.compile(r"(\d+(?:\.\d+)?)([kMG]?)\s*(steps?|samples?|%|)")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class Span(_Quantity):
    """``amount`` of ``unit``: optimizer steps, samples, or per cent of the whole run.

    Written as ``300``, ``"300"``, ``"2M samples"`` (k, M, G) or ``"1%"``.
    """

    amount: Fraction
    unit: Unit

    _pattern = _SPAN
    _wanted = "a span: write 300 (steps), '2M samples' or '1%'"

    @classmethod
    def _of(cls, match: re.Match[str], text: str) -> Self:
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
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        pattern = r"^\d+(\.\d+)?[kMG]?\s*(steps?|samples?|%|)$"
        return {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": pattern}]}
