"""The pipeline of one step as a picture: a row per stage, time to the right, a bar per action, a gap per wait.

TensorBoard shows pictures as thumbnails of about 340 pixels. So the picture is no wider, and a step is broken into
bands, as text is into lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from megatron_run.contracts.observer import Bar, Timeline
    from megatron_run.contracts.schedule import Op

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

#: Pixels: width of the picture, margin, width of the stage's number, height of a row, of text, and between bands.
WIDTH, MARGIN, NAMES, ROW, TEXT, PART = 360, 6, 28, 20, 13, 10
#: Units of time (one chunk's forward) of a band: a bar of one unit holds the label ``10.1``.
UNITS = 12
#: The most rows of a picture; of a longer step the first and the last bands are drawn.
ROWS = 48


def draw(timeline: Timeline) -> Image.Image:
    """Draw ``timeline``; a bar is labelled ``microbatch``, or ``microbatch.chunk`` if a stage has several chunks."""
    count, stages = ceil(timeline.makespan / UNITS), len(timeline.stages)
    most = max(2, ROWS // stages)
    bands = range(count) if count <= most else [*range(ceil(most / 2)), *range(count - most // 2, count)]
    pen = _Pen(timeline, len(bands))
    top: float = MARGIN
    for before, band in zip([-1, *bands], bands, strict=False):
        top = pen.band(band, top, left_out=(band - before - 1) * UNITS)
    return pen.image.crop((0, 0, WIDTH, round(pen.legend(timeline, top))))


class _Pen:
    """Draws bands of rows of bars onto ``image``, which has room for ``bands`` of them and a legend."""

    def __init__(self, timeline: Timeline, bands: int) -> None:
        self._stages = timeline.stages
        self._chunks = any(bar.action.chunk for bars in timeline.stages for bar in bars)
        self._makespan = timeline.makespan
        self._scale = (WIDTH - NAMES - 2 * MARGIN) / min(UNITS, timeline.makespan)
        height = bands * (ROW * len(timeline.stages) + PART) + 3 * (TEXT + MARGIN) + 2 * MARGIN
        self.image = Image.new("RGB", (WIDTH, height), PAPER)
        self._draw = ImageDraw.Draw(self.image)
        self._font = ImageFont.load_default(TEXT)

    def band(self, band: int, top: float, left_out: int = 0) -> float:
        """Draw the rows of ``band``; where the next one begins. ``left_out`` units of time lie before it."""
        first, last = band * UNITS, min((band + 1) * UNITS, self._makespan)
        if left_out:
            self._draw.text((WIDTH / 2, top - 2), f"~ {left_out} units of time ~", INK, self._font, anchor="mm")
            top += PART
        for stage, bars in enumerate(self._stages):
            left = MARGIN + NAMES
            self._draw.text((MARGIN, top + ROW / 2), str(stage), INK, self._font, anchor="lm")
            self._draw.rectangle((left, top + 1, left + (last - first) * self._scale, top + ROW - 1), WAIT)
            for bar in bars:
                if max(first, bar.start) < min(last, bar.end):
                    self._bar(bar, first, last, top)
            top += ROW
        return top + PART

    def _bar(self, bar: Bar, first: float, last: float, top: float) -> None:
        """The part of ``bar`` between two times; of its parts in two bands the longer one has the label."""
        start, end = max(first, bar.start), min(last, bar.end)
        left, right = (MARGIN + NAMES + (time - first) * self._scale for time in (start, end))
        colour = _shade(COLOURS[bar.action.op][0], bar.action.chunk)
        self._draw.rectangle((left, top + 1, right, top + ROW - 1), colour, EDGE)
        label = f"{bar.action.microbatch}.{bar.action.chunk}" if self._chunks else str(bar.action.microbatch)
        longer = 2 * (end - start) > bar.end - bar.start or (
            2 * (end - start) == bar.end - bar.start and end == bar.end
        )
        if longer and self._font.getlength(label) <= right - left:
            self._draw.text(((left + right) / 2, top + ROW / 2), label, INK, self._font, anchor="mm")

    def legend(self, timeline: Timeline, top: float) -> float:
        """Draw a swatch for each operation that occurs, and the share of time in which stages wait; where it ends."""
        ops = {bar.action.op for bars in timeline.stages for bar in bars}
        entries = [entry for op, entry in COLOURS.items() if op in ops]
        left = float(MARGIN)
        for colour, meaning in [*entries, (WAIT, f"wait ({timeline.bubble_fraction:.1%})")]:
            width = TEXT + 4 + self._font.getlength(meaning)
            if left + width > WIDTH - MARGIN:
                left, top = MARGIN, top + TEXT + MARGIN
            self._draw.rectangle((left, top, left + TEXT, top + TEXT), colour, EDGE)
            self._draw.text((left + TEXT + 4, top + TEXT / 2), meaning, INK, self._font, anchor="lm")
            left += width + 2 * MARGIN
        label = "row: stage; in a bar: microbatch" + (".chunk" if self._chunks else "")
        self._draw.text((MARGIN, top + TEXT + MARGIN + TEXT / 2), label, INK, self._font, anchor="lm")
        return top + 2 * (TEXT + MARGIN)


def _shade(colour: Colour, chunk: int) -> Colour:
    """The colour of ``chunk``: each later chunk is a step lighter."""
    share = 0.75**chunk
    red, green, blue = (round(255 - (255 - part) * share) for part in colour)
    return red, green, blue
