"""One quantity over the steps, of one run or two, as SVG.

The runs differ in dash and in colour, and each line ends with its letter, so that a print in black and white tells them
apart too. Behind a line lies what was measured: every step, or where steps are many the range of neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from markupsafe import Markup

from megatron_run_report.drawing.scale import Scale, scale_for, tick_text
from megatron_run_report.thinned import Curve, Point, running_mean

#: Pixels: the picture, and what is left of, above, right of and below the plot.
WIDTH, HEIGHT = 420, 230
LEFT, TOP, RIGHT, BOTTOM = 60, 12, 18, 36
#: Pixels between the letters of two lines that end at the same place.
APART = 13
#: A line is the mean over this share of it, if it has so many points.
WINDOW = 30
#: The most points by which the pointer finds a value.
_FOUND = 150


class Line(NamedTuple):
    """A run's curve: the run's place (0 or 1), its letter, the curve, and how it is drawn.

    ``noise``: its line is a running mean before all that was measured; ``mark``: each point is one, as evaluations are;
    ``plain``: a line through all points, of what is no measurement.
    """

    run: int
    letter: str
    curve: Curve
    how: Literal["noise", "mark", "plain"] = "noise"

    @property
    def points(self) -> Sequence[Point]:
        """The curve's points."""
        return self.curve.points


def chart(title: str, unit: str, lines: Sequence[Line], *, may_log: bool = True, from_zero: bool = False) -> Markup:
    """The picture of ``lines``, of one run or two; ``unit`` is that of their values, whose axis may begin at zero."""
    points = [point for line in lines for point in line.points]
    last = max(line.curve.last.step for line in lines)
    first = min(line.curve.first.step for line in lines)
    across = Scale(first, last if last > first else first + 1, LEFT, WIDTH - RIGHT)
    lows, highs = [point.low for point in points], [point.high for point in points]
    up = scale_for(min(0.0, *lows) if from_zero else min(lows), max(highs), HEIGHT - BOTTOM, TOP, may_log=may_log)
    head = Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}" data-x="{},{},{:.9g},{:.9g}">'
    ).format(WIDTH, HEIGHT, f"{title} over steps", LEFT, WIDTH - RIGHT, across.low, across.high)
    parts = [head, *_axes(across, up, unit), *(part for line in lines for part in _line(line, across, up))]
    parts += _letters(lines, across, up)
    return Markup("").join([*parts, Markup('<line class="found" y1="{}" y2="{}"/></svg>').format(TOP, HEIGHT - BOTTOM)])


def _axes(across: Scale, up: Scale, unit: str) -> Iterator[Markup]:
    for tick in up.ticks():
        y = up.at(tick)
        yield Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(LEFT, WIDTH - RIGHT, y, y)
        yield Markup('<text class="tick" text-anchor="end" x="{}" y="{:.1f}">{}</text>').format(
            LEFT - 6, y + 4, tick_text(tick)
        )
    bottom = HEIGHT - BOTTOM
    yield Markup('<path class="axis" d="M{} {}V{}H{}"/>').format(LEFT, TOP, bottom, WIDTH - RIGHT)
    for tick in filter(float.is_integer, across.ticks(4)):
        yield Markup('<text class="tick" text-anchor="middle" x="{:.1f}" y="{}">{}</text>').format(
            across.at(tick), bottom + 16, tick_text(tick)
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield Markup('<text class="unit" text-anchor="middle" x="{}" y="{}">step</text>').format(middle, HEIGHT - 4)
    scale = f"{unit}, logarithmic" if up.is_log else unit
    yield Markup('<text class="unit" text-anchor="middle" transform="translate(11 {})rotate(-90)">{}</text>').format(
        (TOP + bottom) / 2, scale
    )


def _line(line: Line, across: Scale, up: Scale) -> Iterator[Markup]:
    marks = line.how == "mark" or len(line.points) < WINDOW
    points = drawn(line)
    found = points[:: max(1, -(-len(points) // _FOUND))]
    yield Markup('<g class="run{}" data-run="{}" data-steps="{}" data-values="{}">').format(
        line.run,
        line.letter,
        ",".join(f"{point.step:.9g}" for point in found),
        ",".join(f"{point.mean:.6g}" for point in found),
    )
    if line.how == "noise" and not marks:
        yield _behind(line.points, across, up)
    if len(points) > 1:
        yield Markup('<path class="line" d="{}"/>').format(_path(points, across, up))
    if marks:
        yield from (_mark(line.run, across.at(point.step), up.at(point.mean)) for point in points)
    yield Markup("</g>")


def _letters(lines: Sequence[Line], across: Scale, up: Scale) -> Iterator[Markup]:
    """The letter of each line at its end, the upper one above the other where they would cover each other."""
    ends = [(up.at(drawn(line)[-1].mean), across.at(line.points[-1].step), line) for line in lines]
    taken: list[tuple[float, float]] = []
    for y, x, line in sorted(ends, key=lambda end: -end[0]):
        near = [below for below, beside in taken if abs(beside - x) < 2 * APART]
        place = min([y, HEIGHT - BOTTOM - 4, *(below - APART for below in near)])
        taken.append((place, x))
        yield Markup('<text class="letter run{}" x="{:.1f}" y="{:.1f}">{}</text>').format(
            line.run, x + 4, place + 4, line.letter
        )


def drawn(line: Line) -> Sequence[Point]:
    """The points through which a line goes: all of them where they are few or no measurements, else running means."""
    if line.how != "noise" or len(line.points) < WINDOW:
        return line.points
    return running_mean(line.points, max(3, len(line.points) // WINDOW))


def _behind(points: Sequence[Point], across: Scale, up: Scale) -> Markup:
    """Every step as a thin line, or the range of neighbours as a band."""
    if all(point.low == point.high for point in points):
        return Markup('<path class="steps" d="{}"/>').format(_path(points, across, up))
    there = [f"{across.at(point.step):.1f} {up.at(point.high):.1f}" for point in points]
    back = [f"{across.at(point.step):.1f} {up.at(point.low):.1f}" for point in reversed(points)]
    return Markup('<path class="range" d="M{}Z"/>').format("L".join([*there, *back]))


def _path(points: Sequence[Point], across: Scale, up: Scale) -> str:
    return "M" + "L".join(f"{across.at(point.step):.1f} {up.at(point.mean):.1f}" for point in points)


def _mark(run: int, x: float, y: float) -> Markup:
    """A circle for the first run, a square for the second."""
    if run == 0:
        return Markup('<circle class="mark" cx="{:.1f}" cy="{:.1f}" r="3"/>').format(x, y)
    return Markup('<rect class="mark" x="{:.1f}" y="{:.1f}" width="6" height="6"/>').format(x - 3, y - 3)
