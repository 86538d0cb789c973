"""Charts as one picture that needs nothing else: an SVG file, which a notebook shows by itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_run.drawing.frame import HEIGHT, LEFT, WIDTH, text
from megatron_run.errors import InputError, refuse_taken
from megatron_run.files.foreign_file import open_file
from megatron_run.files.publishing import publishing

#: How charts look. A page that has other colours, as those of the night, sets the variables.
STYLE = """
.drawn text { fill: var(--ink, #16191d); font-size: 12px; }
.drawn .tick, .drawn .unit { fill: var(--faint, #5a6370); font-size: 11px; }
.drawn .title { font-weight: 600; font-size: 13px; }
.drawn .grid { stroke: var(--line, #d5dae0); stroke-width: 1; }
.drawn .axis { fill: none; stroke: var(--faint, #5a6370); stroke-width: 1; }
.drawn .run0 { color: var(--a, #0072b2); }
.drawn .run1 { color: var(--b, #c04a00); }
.drawn .run2 { color: var(--c, #00785a); }
.drawn .run3 { color: var(--d, #a3467c); }
.drawn .line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.drawn .run1 .line { stroke-dasharray: 6 3; }
.drawn .run2 .line { stroke-dasharray: 2 2; }
.drawn .run3 .line { stroke-dasharray: 8 3 2 3; }
.drawn .steps { fill: none; stroke: currentColor; stroke-width: 1; opacity: .35; }
.drawn .range { fill: currentColor; stroke: none; opacity: .22; }
.drawn .mark { fill: currentColor; }
.drawn .joined { fill: none; stroke: currentColor; stroke-width: 1; opacity: .35; }
.drawn .letter { fill: currentColor; font-weight: 700; }
.drawn .found { stroke: var(--ink, #16191d); stroke-width: 1; visibility: hidden; }
"""
#: Runs that are told apart in a chart, and their letters.
LETTERS = "ABCD"
#: Pixels above a chart for its title, and above all for the names of runs.
_TITLE, _NAMES = 26, 24
_BEGIN = '<svg xmlns="http://www.w3.org/2000/svg" class="drawn sheet"'


class Titled(NamedTuple):
    """A chart, and what stands above it."""

    title: str
    chart: str


@dataclass(frozen=True)
class Picture:
    """An SVG file, ``svg``, which a notebook shows as the last value of a cell; ``about`` says what is in it."""

    svg: str
    about: str

    def __repr__(self) -> str:
        return f"{self.about}: a notebook draws this; elsewhere .save('curves.svg')"

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write it into the file ``path``, in the place of an earlier picture; of another file to ``overwrite`` it.

        Raises :class:`InputError`.
        """
        file = Path(path).expanduser()
        refuse_taken(file, "file", overwrite=overwrite or _is_picture(file), inputs=())
        try:
            with publishing(file) as (written,):
                written.write(self.svg.encode())
        except OSError as error:
            raise InputError(
                f"{file} cannot be written", why=error.strerror or str(error), fix="name another file"
            ) from None


def _is_picture(file: Path) -> bool:
    try:
        with open_file(file) as opened:
            return opened.read(len(_BEGIN)) == _BEGIN.encode()
    except OSError:
        return False


def sheet(charts: Sequence[Titled], columns: int, names: Sequence[str] = ()) -> str:
    """``charts`` in rows of ``columns`` on white paper; ``names`` are those of the runs, which have letters then."""
    columns = max(1, min(columns, len(charts)))
    head = _NAMES if names else 0
    width, height = columns * WIDTH, head + -(-len(charts) // columns) * (_TITLE + HEIGHT)
    style = re.sub(r"var\(--\w+, (#\w+)\)", r"\1", STYLE)  # programs besides browsers have no variables
    parts = [
        f'{_BEGIN} width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f"<style>{style}</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(names, width),
    ]
    for index, (title, chart) in enumerate(charts):
        x, y = index % columns * WIDTH, head + index // columns * (_TITLE + HEIGHT)
        parts.append(f'<g transform="translate({x} {y})">{text("title", LEFT, 18, title)}</g>')
        parts.append(f'<g transform="translate({x} {y + _TITLE})">{chart}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _legend(names: Sequence[str], width: int) -> Sequence[str]:
    """A piece of each run's line, its letter and its name, side by side."""
    room = (width - LEFT) // max(1, len(names))
    longest = max(4, room // 8 - 8)  # characters
    found = []
    for index, (letter, name) in enumerate(zip(LETTERS, names, strict=False)):
        x = LEFT + index * room
        short = name if len(name) <= longest else f"{name[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"
        found.append(
            f'<g class="run{index}"><path class="line" d="M{x} 12H{x + 26}"/>{text("letter", x + 32, 16, letter)}</g>'
        )
        found.append(text("name", x + 48, 16, short))
    return found
