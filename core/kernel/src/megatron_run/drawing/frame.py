"""The frame of every chart: its size, its two axes, what they say, and texts that cannot become anything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from megatron_run.drawing.scale import Scale, tick_text
from megatron_run.errors.wording import printable

#: Pixels: the picture, and what is left of, above, right of and below the plot.
WIDTH, HEIGHT = 420, 230
LEFT, TOP, RIGHT, BOTTOM = 60, 12, 18, 36


def begin(label: str, more: str = "") -> str:
    """The first tag of a chart; ``label`` says what it shows to who cannot see it."""
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg class="drawn chart" {size} role="img" aria-label="{quoted(label)}"{more}>'


def axes(up: Scale, below: Iterable[tuple[float, str]], across: str, unit: str) -> Iterator[str]:
    """Both axes: ticks of the scale ``up``, and ``below`` those at pixels with their texts.

    ``across`` and ``unit`` say what is shown over what.
    """
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for tick in up.ticks():
        y = up.at(tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield text("tick", LEFT - 6, y + 4, tick_text(tick), "end")
    yield f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
    yield from (text("tick", x, bottom + 16, words, "middle") for x, words in below)
    yield text("unit", (LEFT + right) / 2, HEIGHT - 4, across, "middle")
    turned = f'transform="translate(11 {(TOP + bottom) / 2:.1f})rotate(-90)"'
    scale = f"{unit}, logarithmic" if up.is_log else unit
    yield f'<text class="unit" text-anchor="middle" {turned}>{quoted(scale)}</text>'


def text(kind: str, x: float, y: float, words: str, anchor: str = "start") -> str:
    """``words`` in the style ``kind``, beginning at, ending at or around ``x``."""
    return f'<text class="{kind}" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{quoted(words)}</text>'


def quoted(words: str) -> str:
    """``words`` of anybody as the content of an element or an attribute."""
    return escape(printable(words))
