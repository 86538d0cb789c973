"""Axes, along which is swept: an axis is one key with the values that it takes, or the range in which they lie."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from megatron_run.errors import InputError
from megatron_run.errors.wording import plural

#: The most runs of a sweep, and values of an axis.
MAX_RUNS = 1000
_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?(?:,(\d{{1,9}}))?")
_BEGUN = re.compile(rf"{_NUMBER}\.\.")
#: The significant digits of a value between the ends of a range.
_DIGITS = 6
_FORMS = "write LOW..HIGH,N, as 0..0.2,5, or evenly in the logarithm 1e-4..1e-2:log,5"


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, both included and as typed; ``log``: evenly in the logarithm."""

    low: str
    high: str
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether both ends are written as whole numbers, and so all that is drawn is one."""
        return all(each.lstrip("+-").isdigit() for each in (self.low, self.high))

    def spaced(self, count: int) -> tuple[str, ...]:
        """``count`` values from end to end, at least two."""
        low, high = float(self.low), float(self.high)
        parts = (index / (count - 1) for index in range(1, count - 1))
        between = (low * (high / low) ** part if self.log else low + (high - low) * part for part in parts)
        return (self.low, *map(_short, between), self.high)


@dataclass(frozen=True)
class Axis:
    """A ``key``, and the ``values`` that it takes, as texts of ``--set``; without any it has a ``range``."""

    key: str
    values: tuple[str, ...] = ()
    range: Range | None = None

    @property
    def corners(self) -> tuple[str, ...]:
        """Values that are valid only where all are: the values, or the ends of the range."""
        return (self.range.low, self.range.high) if self.range and not self.values else self.values


def read_axes(typed: Sequence[str], *, ranges: bool) -> tuple[Axis, ...]:
    """The axes of the words after each ``--over``; ``ranges``: whether one may be left without a number of values.

    Raises :class:`InputError`.
    """
    axes = tuple(_read_axis(text, ranges) for text in typed)
    for index, axis in enumerate(axes):
        if any(axis.key.replace("-", "_") == other.key.replace("-", "_") for other in axes[:index]):
            raise InputError(f"{axis.key} is swept twice", origin="--over", fix="write its values in one --over")
        if axis.key == "run.folder":
            raise InputError("each run of a sweep has a folder of its own", origin="--over run.folder", fix=_ONE_FOLDER)
    return axes


_ONE_FOLDER = "name the folder of all: --folder FOLDER"


def _read_axis(text: str, ranges: bool) -> Axis:
    key, equals, values = text.partition("=")
    key, origin = key.strip(), f"--over {key.strip()}"
    if not equals or not key or not values.strip():
        raise InputError(
            f"--over {text} names no values",
            fix="write KEY=VALUE,VALUE or KEY=LOW..HIGH,N, as train.weight_decay=0,0.1",
        )
    if not _BEGUN.match(values):
        found = tuple(each.strip() for each in values.split(";" if ";" in values else ","))
        if "" in found or len(set(found)) < len(found):
            why = "one is empty" if "" in found else "one is there twice"
            raise InputError(f"{values!r} are not values to compare", why=why, origin=origin, fix="write each once")
        _check_count(len(found), origin)
        return Axis(key, found)
    match = _RANGE.fullmatch(values.strip())
    if match is None:
        raise InputError(f"{values!r} is no range", origin=origin, fix=_FORMS)
    found_range, count = Range(match[1], match[2], bool(match[3])), match[4]
    _check_range(found_range, origin)
    if count is None:
        if not ranges:
            raise InputError(
                f"{values} has no number of values", origin=origin, fix=f"{_FORMS}; or add --sampler optuna --runs N"
            )
        return Axis(key, range=found_range)
    _check_count(int(count), origin, least=2)
    spaced = found_range.spaced(int(count))
    if len(set(map(float, spaced))) < len(spaced):
        why = f"{count} values with {_DIGITS} digits each are not all different"
        raise InputError(f"{values} is too narrow", why=why, origin=origin, fix="write fewer values, or a wider range")
    return Axis(key, spaced, found_range)


def _check_range(found: Range, origin: str) -> None:
    low, high = float(found.low), float(found.high)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(
            f"{found.low}..{found.high} does not rise", origin=origin, fix="write the smaller number first"
        )
    if found.log and low <= 0:
        raise InputError(f"{found.low} has no logarithm", origin=origin, fix="begin above 0, or leave :log out")


def _check_count(count: int, origin: str, least: int = 1) -> None:
    if not least <= count <= MAX_RUNS:
        raise InputError(f"{plural(count, 'value')} on one axis", origin=origin, fix=f"write {least} to {MAX_RUNS}")


def grid(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Every combination, the last axis fastest. Raises :class:`InputError` for more than :data:`MAX_RUNS`."""
    check_runs(math.prod(len(axis.values) for axis in axes))
    return [
        dict(zip((axis.key for axis in axes), values, strict=True)) for values in product(*(a.values for a in axes))
    ]


def check_runs(count: int) -> None:
    """Raise :class:`InputError` for more runs than a sweep has."""
    if count > MAX_RUNS:
        raise InputError(f"{count:,} runs", why=f"a sweep has at most {MAX_RUNS:,}", fix="write fewer values")


def corners(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Few combinations in which each value, and each end of a range, occurs: what a sampler may draw lies between."""
    first = {axis.key: axis.corners[0] for axis in axes}
    others = ({**first, axis.key: value} for axis in axes for value in axis.corners[1:])
    return [first, *others]


def settings(values: Mapping[str, str]) -> tuple[str, ...]:
    """``values`` as words of ``--set``."""
    return tuple(f"{key}={value}" for key, value in values.items())


def _short(value: float) -> str:
    """``value`` with few digits, a whole number as one: a key that takes whole numbers reads it."""
    whole = round(value)
    if abs(value - whole) <= abs(value) * 1e-9 and abs(whole) < 10**15:
        return str(whole)
    return f"{value:.{_DIGITS}g}"
