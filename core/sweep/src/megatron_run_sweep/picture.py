"""A sweep as a picture: for each axis the metric over its values, one point a run. One SVG that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megatron_run.drawing.frame import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, axes, begin, quoted
from megatron_run.drawing.scale import Scale, scale_for
from megatron_run.drawing.sheet import Titled, sheet
from megatron_run_sweep.outcomes import Outcome

#: Panels beside each other.
_ROW = 3
#: The most values of an axis that are written below it, and pixels between the outer ones and its ends.
_TICKS, _INSET = 8, 20


def drawing(found: Sequence[Outcome], metric: str, *, maximize: bool) -> str:
    """The runs of ``found`` that are compared; a line joins those that differ on the panel's axis alone."""
    shown = [each for each in found if each.compared is not None]
    if not shown:
        return sheet([Titled(f"no run has {metric} yet", "")], _ROW)
    panels = (_panel(shown, key, metric, maximize) for key in shown[0].values)
    return sheet(
        [Titled(f"{metric} over {key}", panel) for key, panel in zip(shown[0].values, panels, strict=True)], _ROW
    )


def _panel(shown: Sequence[Outcome], key: str, metric: str, maximize: bool) -> str:
    places = _places([each.values[key] for each in shown])
    values = [_metric(each) for each in shown]
    best = (max if maximize else min)(values)
    up = scale_for(min(values), max(values), HEIGHT - BOTTOM, TOP, may_log=True)
    below = [(place, text if len(text) <= 12 else f"{text[:11]}…") for text, place in _ticks(places)]
    parts = [begin(f"{metric} over {key}"), *axes(up, below, key, metric), '<g class="run0">']
    parts += _joined(shown, key, places, up)
    for each in sorted(shown, key=lambda each: _metric(each) == best):  # the best lies on top
        chosen = _metric(each) == best
        about = f"{each.run}: {metric} {_metric(each):.6g}; " + ", ".join(f"{k}={v}" for k, v in each.values.items())
        parts.append(
            f'<circle class="mark{" run1" if chosen else ""}" cx="{places[each.values[key]]}" '
            f'cy="{up.at(_metric(each)):.1f}" r="{6 if chosen else 4}"><title>{quoted(about)}</title></circle>'
        )
    return "".join([*parts, "</g></svg>"])


def _joined(shown: Sequence[Outcome], key: str, places: dict[str, float], up: Scale) -> Iterator[str]:
    """A line through the runs that have the same values on all other axes."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for each in shown:
        groups.setdefault(tuple(v for k, v in each.values.items() if k != key), []).append(each)
    for group in groups.values():
        points = sorted((places[each.values[key]], up.at(_metric(each))) for each in group)
        if len(points) > 1:
            yield f'<path class="joined" d="M{"L".join(f"{x} {y:.1f}" for x, y in points)}"/>'


def _places(texts: Sequence[str]) -> dict[str, float]:
    """Where each value lies on its axis: numbers by size, in the logarithm over more than a decade; words in order."""
    unique = list(dict.fromkeys(texts))
    left, right = LEFT + _INSET, WIDTH - RIGHT - _INSET
    numbers = [_as_number(text) for text in unique]
    known = [number for number in numbers if number is not None]
    if len(known) < len(unique) or len(set(known)) < 2:
        step = (right - left) / max(len(unique) - 1, 1)
        return {text: round(left + index * step, 1) for index, text in enumerate(unique)}
    low, high = min(known), max(known)
    across = Scale(low, high, left, right, is_log=low > 0 and high / low > 10)
    return {text: round(across.at(number), 1) for text, number in zip(unique, known, strict=True)}


def _ticks(places: dict[str, float]) -> list[tuple[str, float]]:
    """Some of the values, evenly chosen; of numbers in their order."""
    ordered = sorted(places.items(), key=lambda each: each[1])
    if len(ordered) <= _TICKS:
        return ordered
    return [ordered[round(index * (len(ordered) - 1) / 4)] for index in range(5)]


def _as_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _metric(each: Outcome) -> float:
    assert each.compared is not None, "only runs that have one are drawn"
    return each.compared
