"""Charts on a sheet: a picture that needs nothing else, and changes nothing of a page that holds it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from megatron_run.drawing.frame import HEIGHT, WIDTH, begin
from megatron_run.drawing.sheet import LETTERS, STYLE, Titled, sheet

SVG = "{http://www.w3.org/2000/svg}"


def test_styles_reach_nothing_but_drawings_and_need_no_variables() -> None:
    """A notebook may put the picture into its own page, and not every program that shows SVG has variables."""
    assert all(line.startswith(".drawn ") for line in STYLE.strip().splitlines())
    alone = sheet([], 2)
    assert "var(" not in alone
    assert "#0072b2" in alone


@pytest.mark.parametrize(("charts", "across", "down"), [(1, 1, 1), (2, 2, 1), (3, 2, 2), (5, 2, 3)])
def test_charts_lie_in_rows_within_the_sheet(charts: int, across: int, down: int) -> None:
    root = ElementTree.fromstring(sheet([Titled(f"<{n}>", f"{begin('x')}</svg>") for n in range(charts)], 2))
    assert root.get("width") == str(across * WIDTH)
    assert down * HEIGHT < int(root.get("height", "")) < down * (HEIGHT + 40)
    places = [re.findall(r"\d+", group.get("transform", "")) for group in root.iter(f"{SVG}g")]
    assert len({tuple(place) for place in places}) == 2 * charts
    assert all(int(x) < across * WIDTH and int(y) < int(root.get("height", "")) for x, y in places)
    assert [each.text for each in root.iter(f"{SVG}text")] == [f"<{n}>" for n in range(charts)]


def test_long_names_of_runs_do_not_cover_each_other() -> None:
    names = [letter * 300 for letter in LETTERS]
    root = ElementTree.fromstring(sheet([Titled("", "")] * 2, 2, names))
    shown = {each.get("x"): each.text or "" for each in root.iter(f"{SVG}text") if each.get("class") == "name"}
    assert len(shown) == len(LETTERS)
    assert all(len(text) < 30 and text.endswith("\N{HORIZONTAL ELLIPSIS}") for text in shown.values())
