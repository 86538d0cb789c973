"""Predicted over measured steps of all tables, as an SVG picture that is readable on a light page and on a dark one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log10
from typing import NamedTuple

from megatron_run_planner.accuracy import Accuracy

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 16, 44
#: Table -> its colour: told apart by everybody, on white and on black.
COLOURS: Mapping[str, str] = {"single": "#0072b2", "multi": "#d55e00", "narayanan": "#009e73"}
LABELS: Mapping[str, str] = {
    "single": "2 to 8 GPUs",
    "multi": "256 and 512 GPUs",
    "narayanan": "Narayanan et al. 2021, 32 to 3,072",
}


class Scale(NamedTuple):
    """Seconds at both ends of the axes, and those at ticks."""

    low: float
    high: float
    ticks: Sequence[float]

    def along(self, seconds: float) -> float:
        """Where ``seconds`` lies between the ends, by decades."""
        return log10(seconds / self.low) / log10(self.high / self.low)


STEPS = Scale(0.05, 150.0, (0.1, 1, 10, 100))


def picture(found: Mapping[str, Accuracy], scale: Scale = STEPS) -> str:
    """A dot a row: measured seconds across, predicted seconds up, both by decades; the line is equality."""
    parts = [*_frame(scale)]
    for index, (name, accuracy) in enumerate(found.items()):
        colour = COLOURS.get(name, "#0072b2")
        parts += [
            f'<circle cx="{_x(each.row.seconds, scale):.1f}" cy="{_y(each.predicted, scale):.1f}" r="2.5" '
            f'fill="{colour}" fill-opacity="0.5"/>'
            for each in accuracy.rows
        ]
        label = f"{LABELS.get(name, name)}: {len(accuracy.rows)} rows, mean error {accuracy.mean_error:.1%}"
        parts.append(_text(LEFT + 14, TOP + 18 + 18 * index, label, colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    return "\n".join(
        (f'{head} font-size="12" role="img" aria-label="Predicted and measured steps">', *parts, "</svg>\n")
    )


def _frame(scale: Scale) -> Iterator[str]:
    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    yield f'<path d="M{LEFT} {TOP}V{floor}H{right}" fill="none" stroke="#888888"/>'
    yield f'<path d="M{LEFT} {floor}L{right} {TOP}" fill="none" stroke="#888888" stroke-dasharray="4 3"/>'
    for tick in scale.ticks:
        yield _text(_x(tick, scale), floor + 16, f"{tick:g} s", "#888888", "middle")
        yield _text(LEFT - 6, _y(tick, scale) + 4, f"{tick:g} s", "#888888", "end")
    yield _text((LEFT + right) / 2, HEIGHT - 6, "measured step, predicted upwards", "#888888", "middle")


def _x(seconds: float, scale: Scale) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * scale.along(seconds)


def _y(seconds: float, scale: Scale) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * scale.along(seconds)


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{text}</text>'
