"""Axes and curves: what is drawn lies where its value says, and letters do not cover each other."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from megatron_run.drawing.chart import APART, Line, chart
from megatron_run.drawing.curve import At, Curve, Point
from megatron_run.drawing.frame import HEIGHT, LEFT, RIGHT, WIDTH
from megatron_run.drawing.scale import scale_for, tick_text


def curve(values: dict[int, float]) -> Curve:
    points = tuple(Point(step, value, value, value) for step, value in values.items())
    ends = [At(step, value) for step, value in values.items()]
    by_value = sorted(ends, key=lambda at: at.value)
    return Curve(points, len(ends), sum(values.values()) / len(ends), ends[0], ends[-1], by_value[0], by_value[-1])


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.5, 2.5), (-3.0, 8.0), (1e-9, 2e-9), (0.0, 0.0), (1e5, 9e5)])
def test_ticks_are_few_and_within_and_ends_lie_at_the_ends(low: float, high: float) -> None:
    scale = scale_for(low, high, 100, 0, may_log=True)
    assert 2 <= len(scale.ticks()) <= 7
    assert all(0 <= scale.at(tick) <= 100 for tick in scale.ticks())
    assert scale.at(high) < 50 or low == high
    assert len({tick_text(tick) for tick in scale.ticks()}) == len(scale.ticks())


@pytest.mark.parametrize(("low", "high"), [(0.01, 10.0), (1e-8, 1e8), (3.0, 100.0)])
def test_values_far_apart_are_drawn_by_their_logarithm(low: float, high: float) -> None:
    scale = scale_for(low, high, 0, 100, may_log=True)
    assert scale.is_log
    middle = (scale.at(low) + scale.at(high)) / 2
    assert scale.at((low * high) ** 0.5) == pytest.approx(middle)
    assert 2 <= len(scale.ticks()) <= 9
    assert not scale_for(low, high, 0, 100, may_log=False).is_log
    assert not scale_for(-low, high, 0, 100, may_log=True).is_log


def test_ticks_read_well() -> None:
    assert [*map(tick_text, (0, 0.25, 12_000, 5e-4, 2.5e-4, 2e-5, 3e6, -40))] == [
        "0", "0.25", "12k", "5e-4", "2.5e-4", "2e-5", "3M", "-40",
    ]  # fmt: skip


def test_a_chart_is_whole_svg_inside_its_picture() -> None:
    lines = [
        Line(0, "A", curve({step: 1 / (step + 1) for step in range(100)})),
        Line(1, "B", curve(dict.fromkeys(range(50), 2.0))),
    ]
    root = ElementTree.fromstring(chart("Loss & <more>", "<nats>", lines))
    assert root.get("aria-label") == "Loss & <more> over steps"
    assert "<nats>, logarithmic" in {each.text for each in root.iter("text")}
    paths = [each.get("d", "") for each in root.iter("path")]
    pairs = [(float(x), float(y)) for path in paths[1:] for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)]
    assert pairs
    assert all(LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1 and 0 <= y <= HEIGHT for x, y in pairs)


def test_lines_that_end_at_one_place_have_letters_above_each_other() -> None:
    same = curve({1: 3.0, 2: 1.0})
    root = ElementTree.fromstring(chart("x", "", [Line(0, "A", same), Line(1, "B", same)]))
    letters = {each.text: float(each.get("y", "")) for each in root.iter("text") if "letter" in each.get("class", "")}
    assert letters["A"] - letters["B"] == pytest.approx(APART, abs=0.2)
    lines = [Line(0, "A", curve({1: 0.0, 9: 0.0})), Line(1, "B", curve({2: 0.0}))]
    apart = ElementTree.fromstring(chart("x", "", lines))
    assert len({each.get("y") for each in apart.iter("text") if "letter" in each.get("class", "")}) == 1


def test_one_value_alone_is_a_mark() -> None:
    root = ElementTree.fromstring(chart("x", "", [Line(0, "", curve({7: 2.0}))]))
    assert len([*root.iter("circle")]) == 1


def test_an_axis_may_begin_at_zero_however_little_its_values_differ() -> None:
    """As that of memory, of which a part is the question."""
    lines = [Line(0, "", curve({1: 0.306, 2: 0.308}), "plain")]
    for from_zero, first in ((True, "0"), (False, "0.306")):
        root = ElementTree.fromstring(chart("Memory", "GiB", lines, may_log=False, from_zero=from_zero))
        ticks = [each.text for each in root.iter("text") if each.get("text-anchor") == "end"]
        assert ticks[0] == first
