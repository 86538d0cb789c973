"""The pipeline of one step as a picture: a row per stage, time to the right, a bar per action, a gap per wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from megatron_run.contracts.actions import Op
    from megatron_run.contracts.observer import Bar, Timeline

Colour = tuple[int, int, int]

#: Colours safe for all kinds of colour vision (Okabe and Ito, https://jfly.uni-koeln.de/color/), and their meanings.
COLOURS: Mapping[Op, tuple[Colour, str]] = {
    "F": ((86, 180, 233), "forward"),
    "B": ((230, 159, 0), "backward"),
    "I": ((213, 94, 0), "input gradient"),
    "W": ((0, 158, 115), "weight gradient"),
    "R": ((204, 121, 167), "recompute"),
}
PAPER, INK, EDGE, WAIT = (255, 255, 255), (20, 20, 20), (90, 90, 90), (238, 238, 238)

#: Pixels: row height, margin, width of the stage names, text height, and the drawing's minimum and maximum width.
ROW, MARGIN, NAMES, TEXT, LEAST, GREATEST = 36, 16, 84, 13, 560, 8000
#: Pixels for one unit of time (one chunk's forward), where the width allows.
UNIT = 34


def draw(timeline: Timeline) -> Image.Image:
    """Draw ``timeline``; a bar is labelled ``microbatch``, or ``microbatch.chunk`` if a stage has several chunks."""
    width = min(GREATEST, max(LEAST, round(timeline.makespan * UNIT)))
    height = MARGIN + ROW * len(timeline.stages) + 3 * MARGIN + TEXT
    image = Image.new("RGB", (NAMES + width + 2 * MARGIN, height), PAPER)
    pen = _Pen(image, width / timeline.makespan, _chunks(timeline) > 1)
    for stage, bars in enumerate(timeline.stages):
        pen.row(stage, bars, width)
    pen.legend(timeline, height - MARGIN - TEXT)
    return image


def _chunks(timeline: Timeline) -> int:
    return 1 + max((bar.action.chunk for bars in timeline.stages for bar in bars), default=0)


class _Pen:
    """Draws rows of bars; ``scale`` is pixels per unit of time."""

    def __init__(self, image: Image.Image, scale: float, chunks: bool) -> None:
        self._draw = ImageDraw.Draw(image)
        self._font = ImageFont.load_default(TEXT)
        self._scale, self._chunks = scale, chunks

    def row(self, stage: int, bars: tuple[Bar, ...], width: int) -> None:
        """Draw the name of one stage, waiting time as background, and its bars."""
        left, top = MARGIN + NAMES, MARGIN + stage * ROW
        self._draw.text((MARGIN, top + ROW / 2), f"stage {stage}", INK, self._font, anchor="lm")
        self._draw.rectangle((left, top + 3, left + width, top + ROW - 3), WAIT)
        for bar in bars:
            if bar.end > bar.start:
                self._bar(bar, left, top)

    def _bar(self, bar: Bar, left: float, top: float) -> None:
        begin, end = left + bar.start * self._scale, left + bar.end * self._scale
        colour = _shade(COLOURS[bar.action.op][0], bar.action.chunk)
        self._draw.rectangle((begin, top + 3, end, top + ROW - 3), colour, EDGE)
        label = f"{bar.action.microbatch}.{bar.action.chunk}" if self._chunks else str(bar.action.microbatch)
        if self._font.getlength(label) + 4 <= end - begin:
            self._draw.text(((begin + end) / 2, top + ROW / 2), label, INK, self._font, anchor="mm")

    def legend(self, timeline: Timeline, top: float) -> None:
        """Draw a swatch for each operation that occurs, and the share of time in which stages wait."""
        ops = {bar.action.op for bars in timeline.stages for bar in bars}
        entries = [entry for op, entry in COLOURS.items() if op in ops]
        left = float(MARGIN)
        for colour, meaning in [*entries, (WAIT, f"wait ({timeline.bubble_fraction:.1%})")]:
            self._draw.rectangle((left, top, left + TEXT, top + TEXT), colour, EDGE)
            self._draw.text((left + TEXT + 6, top + TEXT / 2), meaning, INK, self._font, anchor="lm")
            left += TEXT + 24 + self._font.getlength(meaning)
        label = "in a bar: microbatch" + (".chunk" if self._chunks else "")
        self._draw.text((left, top + TEXT / 2), label, INK, self._font, anchor="lm")


def _shade(colour: Colour, chunk: int) -> Colour:
    """The colour of ``chunk``: each later chunk is a step lighter."""
    share = 0.75**chunk
    red, green, blue = (round(255 - (255 - part) * share) for part in colour)
    return red, green, blue
