"""A sweep as a picture: for each axis the metric over its values, one point a run. One SVG that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from xml.sax.saxutils import escape

from megatron_run.errors.wording import printable
from megatron_run_sweep.outcomes import Outcome

#: Sizes in pixels: of a panel with its margins, and of the plot within it; panels beside each other.
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 420, 300, 74, 40, 20, 52
_ROW = 3
#: The most values of an axis that are written below it.
_TICKS = 8
_POINT, _BEST, _LINE = "#2563eb", "#dc2626", "#cbd5e1"


def drawing(found: Sequence[Outcome], metric: str, *, maximize: bool) -> str:
    """The runs of ``found`` that have a metric; a line joins those that differ on the panel's axis alone."""
    shown = [each for each in found if each.metric is not None]
    keys = list(shown[0].values) if shown else []
    columns = min(max(len(keys), 1), _ROW)
    width, height = columns * _WIDTH, max(1, math.ceil(len(keys) / _ROW)) * _HEIGHT
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    if not shown:
        lines.append(_text(_LEFT, _TOP, f"no run has {metric} yet", "start"))
    for index, key in enumerate(keys):
        lines.append(f'<g transform="translate({index % _ROW * _WIDTH} {index // _ROW * _HEIGHT})">')
        lines += _panel(shown, key, metric, maximize)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(shown: Sequence[Outcome], key: str, metric: str, maximize: bool) -> Iterator[str]:
    places = _places([each.values[key] for each in shown])
    values = [_metric(each) for each in shown]
    best = (max if maximize else min)(values)
    lowest, highest = _padded(min(values), max(values))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def height(value: float) -> float:
        return round(bottom - (value - lowest) / (highest - lowest) * (bottom - _TOP), 1)

    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#64748b"/>'
    for value in (min(values), max(values)) if min(values) < max(values) else values[:1]:
        yield _text(_LEFT - 6, height(value) + 4, f"{value:.4g}", "end")
    for text, place in _ticks(places):
        yield _text(place, bottom + 18, text if len(text) <= 12 else f"{text[:11]}…", "middle")
    yield _text((_LEFT + right) / 2, bottom + 40, key, "middle")
    yield _text(_LEFT - 6, _TOP - 14, metric, "start")
    yield from _joined(shown, key, places, height)
    for each in sorted(shown, key=lambda each: _metric(each) == best):  # the best lies on top
        chosen = _metric(each) == best
        about = f"{each.run}: {metric} {_metric(each):.6g}; " + ", ".join(f"{k}={v}" for k, v in each.values.items())
        yield (
            f'<circle cx="{places[each.values[key]]}" cy="{height(_metric(each))}" r="{6 if chosen else 4}" '
            f'fill="{_BEST if chosen else _POINT}"><title>{escape(printable(about))}</title></circle>'
        )


def _joined(
    shown: Sequence[Outcome], key: str, places: dict[str, float], height: Callable[[float], float]
) -> Iterator[str]:
    """A line through the runs that have the same values on all other axes."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for each in shown:
        groups.setdefault(tuple(v for k, v in each.values.items() if k != key), []).append(each)
    for group in groups.values():
        points = sorted((places[each.values[key]], height(_metric(each))) for each in group)
        if len(points) > 1:
            yield f'<path d="M{" L".join(f"{x} {y}" for x, y in points)}" fill="none" stroke="{_LINE}"/>'


def _places(texts: Sequence[str]) -> dict[str, float]:
    """Where each value lies on its axis: numbers by size, in the logarithm over more than a decade; words in order."""
    unique = list(dict.fromkeys(texts))
    left, right = _LEFT + 20, _WIDTH - _RIGHT - 20
    numbers = [_as_number(text) for text in unique]
    known = [number for number in numbers if number is not None]
    if len(known) < len(unique) or len(set(known)) < 2:
        step = (right - left) / max(len(unique) - 1, 1)
        return {text: round(left + index * step, 1) for index, text in enumerate(unique)}
    low, high = min(known), max(known)
    scale = math.log if low > 0 and high / low > 10 else float
    begin, end = scale(low), scale(high)
    shares = ((scale(number) - begin) / (end - begin) for number in known)
    return {text: round(left + share * (right - left), 1) for text, share in zip(unique, shares, strict=True)}


def _ticks(places: dict[str, float]) -> list[tuple[str, float]]:
    """Some of the values, evenly chosen; of numbers in their order."""
    ordered = sorted(places.items(), key=lambda each: each[1])
    if len(ordered) <= _TICKS:
        return ordered
    return [ordered[round(index * (len(ordered) - 1) / 4)] for index in range(5)]


def _padded(low: float, high: float) -> tuple[float, float]:
    """The ends of the upright axis: a little beyond the values, and apart."""
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _as_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _metric(each: Outcome) -> float:
    assert each.metric is not None, "only runs that have one are drawn"
    return each.metric


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#334155">{escape(printable(text))}</text>'
