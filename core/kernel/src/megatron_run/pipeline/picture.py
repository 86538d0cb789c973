"""A plan as a picture: SVG with one row per stage and one bar per action; gaps are waits.

Colours can be told apart with every kind of colour vision (Okabe and Ito, https://jfly.uni-koeln.de/color/); chunks of
a stage are shades of them. A band below each stage's bars shows its warm-up, steady and cool-down phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import NamedTuple

from megatron_run.contracts.observer import Bar, Timeline
from megatron_run.contracts.schedule import Action
from megatron_run.errors.wording import plural
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.simulate import timeline
from megatron_run.pipeline.trace_events import NAMES


class Phases(NamedTuple):
    """Numbers of actions in the warm-up, steady and cool-down phases of a stage's list; any may be 0.

    Warm-up ends before the first backward; cool-down begins after the last forward.
    """

    warmup: int
    steady: int
    cooldown: int


def phases(actions: Sequence[Action]) -> Phases:
    """The phases of one stage's list; a list without backwards is all warm-up."""
    first_backward = next((index for index, action in enumerate(actions) if action.op in "BI"), len(actions))
    after_forward = next((len(actions) - i for i, action in enumerate(reversed(actions)) if action.op == "F"), 0)
    after_forward = max(first_backward, after_forward)
    return Phases(first_backward, after_forward - first_backward, len(actions) - after_forward)


def leading_forwards(actions: Sequence[Action]) -> int:
    """Number of forwards before the first backward."""
    return sum(action.op == "F" for action in actions[: phases(actions).warmup])


Colour = tuple[int, int, int]

#: Colour of each operation.
COLOURS: Mapping[str, Colour] = {
    "F": (86, 180, 233),
    "B": (230, 159, 0),
    "I": (213, 94, 0),
    "W": (0, 158, 115),
    "R": (204, 121, 167),
    "S": (0, 0, 0),
}
#: Name and grey of each phase; the grey of waiting.
PHASES = (("warm-up", "#d9d9d9"), ("steady", "#7f7f7f"), ("cool-down", "#bdbdbd"))
WAIT = "#f2f2f2"

#: Sizes in pixels: a bar, the band below it, a row with its gap, the margin, a stage's name, a swatch of the legend.
BAR, BAND, ROW, MARGIN, STAGE, SWATCH = 26, 12, 48, 20, 70, 14
#: Pixels per unit of time, unless the width exceeds the greatest; the least width has room for the legend.
UNIT, GREATEST, LEAST = 24.0, 20000.0, 640.0
#: Width in pixels of a digit in a bar and of a letter in a band.
DIGIT, LETTER = 7.5, 5.2

_STYLE = """
text { font-family: Helvetica, Arial, sans-serif; font-size: 12px; fill: #141414; }
.title { font-size: 16px; font-weight: bold; }
.number { text-anchor: middle; }
.phase-name { text-anchor: middle; font-size: 9px; }
.steady-name { fill: #ffffff; }
.tick { text-anchor: middle; font-size: 10px; fill: #5a5a5a; }
.action { stroke: #5a5a5a; stroke-width: 0.6; }
.grid { stroke: #5a5a5a; stroke-width: 0.6; }
"""


def schedule_svg(plan: Plan, title: str) -> str:
    """The picture of ``plan`` under ``title``, as the text of an SVG file."""
    drawn = timeline(plan)
    width = min(GREATEST, max(LEAST, drawn.makespan * UNIT))
    canvas = _Canvas(plan, drawn, width / drawn.makespan, width)
    return "\n".join(canvas.lines(title)) + "\n"


class _Canvas:
    """Draws one plan; ``scale`` is pixels per unit of time, ``width`` is that of the whole step in pixels."""

    def __init__(self, plan: Plan, drawn: Timeline, scale: float, width: float) -> None:
        self._plan, self._drawn, self._scale, self._width = plan, drawn, scale, width
        self._left, self._top = MARGIN + STAGE, MARGIN + 52.0
        self._ops = [op for op in COLOURS if any(a.op == op for actions in plan.lists for a in actions)]

    def lines(self, title: str) -> Iterator[str]:
        """All lines of the file."""
        bottom = self._top + ROW * self._plan.stages
        width, height = self._left + self._width + MARGIN, bottom + 100
        yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
        yield f'     viewBox="0 0 {width:g} {height:g}" role="img">'
        yield f"<title>{escape(title)}</title>"
        yield f"<style>{_STYLE}{self._shades()}</style>"
        yield f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>'
        yield f'<text class="title" x="{MARGIN}" y="{MARGIN + 14}">{escape(title)}</text>'
        yield f'<text x="{MARGIN}" y="{MARGIN + 34}">{self._summary()}</text>'
        for stage, bars in enumerate(self._drawn.stages):
            yield from self._row(stage, bars)
        yield from self._axis(bottom)
        yield from self._legend(bottom + 48)
        yield "</svg>"

    def _shades(self) -> str:
        plan = self._plan
        return "".join(
            f".{op}{chunk} {{ fill: {_shade(COLOURS[op], chunk, plan.chunks)}; }}\n"
            for op in self._ops
            for chunk in range(plan.chunks)
        )

    def _summary(self) -> str:
        plan, drawn = self._plan, self._drawn
        shape = f"{plural(plan.stages, 'stage')} x {plural(plan.chunks, 'chunk')}"
        shape += f", {plural(plan.microbatches, 'microbatch')}"
        peaks = f"{plan.peak_in_flight[0]} in flight on stage 0, {plan.peak_in_flight[-1]} on the last"
        return f"{shape}; bubble {drawn.bubble_fraction:.1%}; at most {peaks}"

    def _row(self, stage: int, bars: Sequence[Bar]) -> Iterator[str]:
        top = self._top + stage * ROW
        yield f'<g id="stage{stage}">'
        yield f'<text x="{MARGIN}" y="{top + BAR / 2 + 4:g}">stage {stage}</text>'
        yield f'<rect x="{self._left:g}" y="{top:g}" width="{self._width:g}" height="{BAR}" fill="{WAIT}"/>'
        for bar in bars:
            yield from self._bar(bar, top)
        yield from self._phases(stage, bars, top + BAR + 1)
        yield "</g>"

    def _bar(self, bar: Bar, top: float) -> Iterator[str]:
        (op, microbatch, chunk), start, end = bar
        x, width = self._left + start * self._scale, max((end - start) * self._scale, 1.5)
        about = f"{bar.action}: {NAMES[op]} of microbatch {microbatch} in chunk {chunk}, {start:g} to {end:g}"
        place = f'x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{BAR}"'
        yield f'<rect class="action {op}{chunk}" {place}><title>{about}</title></rect>'
        if op != "S" and len(str(microbatch)) * DIGIT <= width:
            yield f'<text class="number" x="{x + width / 2:.2f}" y="{top + BAR / 2 + 4:g}">{microbatch}</text>'

    def _phases(self, stage: int, bars: Sequence[Bar], top: float) -> Iterator[str]:
        """The band below the bars: a phase extends from its first bar to the next phase's first, or to the end."""
        counts = phases(self._plan.lists[stage])
        for (name, grey), count, after in zip(PHASES, counts, accumulate(counts), strict=True):
            if not count:
                continue
            start, end = bars[after - count].start, bars[after].start if after < len(bars) else bars[-1].end
            x, width = self._left + start * self._scale, (end - start) * self._scale
            place = f'x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{BAND}"'
            yield f'<rect class="phase {name}" {place} fill="{grey}"><title>{name}</title></rect>'
            if len(name) * LETTER <= width:
                middle = f'x="{x + width / 2:.2f}" y="{top + BAND - 3:g}"'
                yield f'<text class="phase-name {name}-name" {middle}>{name}</text>'

    def _axis(self, top: float) -> Iterator[str]:
        """Ticks at round times, at least 40 pixels apart."""
        step = next(n for n in _round_numbers() if n * self._scale >= 40)
        for index in range(int(self._drawn.makespan / step) + 1):
            x = self._left + index * step * self._scale
            yield f'<line class="grid" x1="{x:.2f}" y1="{top:g}" x2="{x:.2f}" y2="{top + 5:g}"/>'
            yield f'<text class="tick" x="{x:.2f}" y="{top + 17:g}">{index * step}</text>'
        unit = "time, in forwards of one chunk"
        yield f'<text class="tick" style="text-anchor: start" x="{self._left:g}" y="{top + 32:g}">{unit}</text>'

    def _legend(self, top: float) -> Iterator[str]:
        """A swatch for each operation, for waiting, for each phase, and for the shades of the chunks."""
        yield '<g id="legend">'
        entries = [(_hex(COLOURS[op]), NAMES[op]) for op in self._ops]
        entries += [(WAIT, "wait"), *((grey, name) for name, grey in PHASES)]
        yield from swatches(entries, top)
        if self._plan.chunks > 1:
            shown = range(min(self._plan.chunks, 8))
            yield from swatches([(self._colours(chunk), f"chunk {chunk}") for chunk in shown], top + SWATCH + 8)
        yield "</g>"

    def _colours(self, chunk: int) -> str:
        """The colours of the operations of ``chunk``, for a legend."""
        return " ".join(_shade(COLOURS[op], chunk, self._plan.chunks) for op in self._ops)


def swatches(entries: Sequence[tuple[str, str]], top: float) -> Iterator[str]:
    """A row of a legend: pairs of a colour, or several with spaces between them, and what it stands for."""
    x = float(MARGIN)
    for colours, meaning in entries:
        for index, colour in enumerate(colours.split()):
            x += SWATCH * (index > 0)
            yield f'<rect x="{x:g}" y="{top:g}" width="{SWATCH}" height="{SWATCH}" fill="{colour}" stroke="#5a5a5a"/>'
        yield f'<text x="{x + SWATCH + 5:g}" y="{top + SWATCH - 3:g}">{meaning}</text>'
        x += SWATCH + 5 + len(meaning) * 7.2 + 14


def _round_numbers() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ..."""
    size = 1
    while True:
        yield from (size, 2 * size, 5 * size)
        size *= 10


def _shade(colour: Colour, chunk: int, chunks: int) -> str:
    """``colour`` for the first chunk, lighter for each later one, at most about two thirds of the way to white."""
    white = 0.65 * chunk / max(1, chunks - 1)
    red, green, blue = (round(part + (255 - part) * white) for part in colour)
    return _hex((red, green, blue))


def _hex(colour: Colour) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)
