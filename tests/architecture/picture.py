"""Draws the house: one row a floor, one box an entry, one line an import that no other import implies.

``python -m tests.architecture.picture`` writes docs/images/house.svg.
"""

from __future__ import annotations

from pathlib import Path

from tests.architecture.house import Graph, House, floors
from tests.support.checkout import COMMAND_LINE, ENGINE, KERNEL, UPON

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "docs" / "images" / "house.svg"
#: Import root -> its colour: the kernel's, the engine's, and those of all that stands on them.
COLOURS = dict(
    zip(
        (each.package for each in (KERNEL, ENGINE, *UPON, COMMAND_LINE)),
        ("#dbeafe", "#dcfce7", "#cffafe", "#ffedd5", "#fee2e2", "#ede9fe", "#fef3c7", "#fae8ff"),
        strict=True,
    )
)
FONT = 'font-family="sans-serif" font-size="13"'
WIDTH, BOX, GAP, ROW, HEIGHT, MARGIN, LEGEND = 900, 112, 18, 78, 34, 76, 4


def drawing(house: House) -> str:
    """The picture as SVG; equal for equal imports."""
    levels = floors(house.entries)
    top = max(levels.values())
    centres = dict(_centres(levels, top))
    height = top * ROW + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT}>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for name, below in sorted(implied_by_none(house.entries).items()):
        x, y = centres[name]
        for other in sorted(below):
            x2, y2 = centres[other]
            lines.append(
                f'<path d="M{x} {y + HEIGHT // 2} C{x} {y + ROW // 2} {x2} {y2 - ROW // 2} {x2} {y2 - HEIGHT // 2}" '
                'fill="none" stroke="#94a3b8"/>'
            )
    for name, (x, y) in sorted(centres.items()):
        root, _, entry = name.partition(".")
        label = entry or root.removeprefix("megatron_run_")
        lines.append(
            f'<rect x="{x - BOX // 2}" y="{y - HEIGHT // 2}" width="{BOX}" height="{HEIGHT}" rx="6" '
            f'fill="{COLOURS[root]}" stroke="#64748b"/>'
        )
        lines.append(f'<text x="{x}" y="{y + 5}" text-anchor="middle">{label}</text>')
    lines += [
        f'<text x="12" y="{(top - level) * ROW + MARGIN + 5}" fill="#64748b">{level}</text>'
        for level in range(1, top + 1)
    ]
    for index, (root, colour) in enumerate(COLOURS.items()):
        x, y = 20 + index % LEGEND * 220, 8 + index // LEGEND * 20
        lines.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{colour}" stroke="#64748b"/>')
        lines.append(f'<text x="{x + 20}" y="{y + 12}" fill="#334155">{root}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _centres(levels: dict[str, int], top: int) -> list[tuple[str, tuple[int, int]]]:
    found = []
    for level in range(1, top + 1):
        names = sorted(
            (name for name, at in levels.items() if at == level),
            key=lambda name: ([*COLOURS].index(name.partition(".")[0]), name),
        )
        left = (WIDTH - len(names) * (BOX + GAP) + GAP) // 2
        y = (top - level) * ROW + MARGIN
        found += [(name, (left + index * (BOX + GAP) + BOX // 2, y)) for index, name in enumerate(names)]
    return found


def implied_by_none(graph: Graph) -> dict[str, set[str]]:
    """Each name's imports without those that another of its imports reaches (the transitive reduction)."""
    below: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in below:
            below[name] = set(graph[name]).union(*(reach(each) for each in graph[name]))
        return below[name]

    return {
        name: {each for each in graph[name] if not any(each in reach(other) for other in graph[name])} for name in graph
    }


if __name__ == "__main__":
    TARGET.write_text(drawing(House(ROOT)), encoding="utf-8")
