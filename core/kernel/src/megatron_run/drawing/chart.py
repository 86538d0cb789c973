"""One quantity over the steps, of one run or a few, as SVG.

The runs differ in dash and in colour, and each line ends with its letter, so that a print in black and white tells them
apart too. Behind a line lies what was measured: every step, or where steps are many the range of neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from megatron_run.drawing.curve import Curve, Point, running_mean
from megatron_run.drawing.frame import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, axes, begin, text
from megatron_run.drawing.scale import Scale, scale_for, tick_text

#: Pixels between the letters of two lines that end at the same place.
APART = 13
#: A line is the mean over this share of it, if it has so many points.
WINDOW = 30
#: The most points by which the pointer finds a value.
_FOUND = 150

How = Literal["noise", "mark", "plain"]


class Line(NamedTuple):
    """A run's curve: the run's place (from 0), its letter, the curve, and how it is drawn.

    ``noise``: its line is a running mean before all that was measured; ``mark``: each point is one, as evaluations are;
    ``plain``: a line through all points, of what is no measurement.
    """

    run: int
    letter: str
    curve: Curve
    how: How = "noise"

    @property
    def points(self) -> Sequence[Point]:
        """The curve's points."""
        return self.curve.points


def chart(title: str, unit: str, lines: Sequence[Line], *, may_log: bool = True, from_zero: bool = False) -> str:
    """The picture of ``lines``; ``unit`` is that of their values, whose axis may begin at zero."""
    points = [point for line in lines for point in line.points]
    last = max(line.curve.last.step for line in lines)
    first = min(line.curve.first.step for line in lines)
    across = Scale(first, last if last > first else first + 1, LEFT, WIDTH - RIGHT)
    lows, highs = [point.low for point in points], [point.high for point in points]
    up = scale_for(min(0.0, *lows) if from_zero else min(lows), max(highs), HEIGHT - BOTTOM, TOP, may_log=may_log)
    where = f' data-x="{LEFT},{WIDTH - RIGHT},{across.low:.9g},{across.high:.9g}"'
    steps = [(across.at(tick), tick_text(tick)) for tick in across.ticks(4) if float(tick).is_integer()]
    parts = [begin(f"{title} over steps", where), *axes(up, steps, "step", unit)]
    parts += [part for line in lines for part in _line(line, across, up)]
    parts += _letters(lines, across, up)
    return "".join([*parts, f'<line class="found" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'])


def _line(line: Line, across: Scale, up: Scale) -> Iterator[str]:
    marks = line.how == "mark" or len(line.points) < WINDOW
    points = drawn(line)
    found = points[:: max(1, -(-len(points) // _FOUND))]
    steps = ",".join(f"{point.step:.9g}" for point in found)
    values = ",".join(f"{point.mean:.6g}" for point in found)
    yield f'<g class="run{line.run}" data-run="{line.letter}" data-steps="{steps}" data-values="{values}">'
    if line.how == "noise" and not marks:
        yield _behind(line.points, across, up)
    if len(points) > 1:
        yield f'<path class="line" d="{_path(points, across, up)}"/>'
    if marks:
        yield from (_mark(line.run, across.at(point.step), up.at(point.mean)) for point in points)
    yield "</g>"


def _letters(lines: Sequence[Line], across: Scale, up: Scale) -> Iterator[str]:
    """The letter of each line at its end, the upper one above the other where they would cover each other."""
    ends = [(up.at(drawn(line)[-1].mean), across.at(line.points[-1].step), line) for line in lines]
    taken: list[tuple[float, float]] = []
    for y, x, line in sorted(ends, key=lambda end: -end[0]):
        near = [below for below, beside in taken if abs(beside - x) < 2 * APART]
        place = min([y, HEIGHT - BOTTOM - 4, *(below - APART for below in near)])
        taken.append((place, x))
        yield text(f"letter run{line.run}", x + 4, place + 4, line.letter)


def drawn(line: Line) -> Sequence[Point]:
    """The points through which a line goes: all of them where they are few or no measurements, else running means."""
    if line.how != "noise" or len(line.points) < WINDOW:
        return line.points
    return running_mean(line.points, max(3, len(line.points) // WINDOW))


def _behind(points: Sequence[Point], across: Scale, up: Scale) -> str:
    """Every step as a thin line, or the range of neighbours as a band."""
    if all(point.low == point.high for point in points):
        return f'<path class="steps" d="{_path(points, across, up)}"/>'
    there = [f"{across.at(point.step):.1f} {up.at(point.high):.1f}" for point in points]
    back = [f"{across.at(point.step):.1f} {up.at(point.low):.1f}" for point in reversed(points)]
    return f'<path class="range" d="M{"L".join([*there, *back])}Z"/>'


def _path(points: Sequence[Point], across: Scale, up: Scale) -> str:
    return "M" + "L".join(f"{across.at(point.step):.1f} {up.at(point.mean):.1f}" for point in points)


def _mark(run: int, x: float, y: float) -> str:
    """A circle for the first run and the third, a square for the others."""
    if run % 2 == 0:
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    return f'<rect class="mark" x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>'
