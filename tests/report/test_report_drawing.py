"""Axes, curves, ranks and steps: what is drawn lies where its value says, and letters do not cover each other."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_run_report.drawing.chart import APART, HEIGHT, LEFT, RIGHT, WIDTH, Line, chart
from megatron_run_report.drawing.ranks import ranks_drawn, ranks_text
from megatron_run_report.drawing.scale import scale_for, tick_text
from megatron_run_report.drawing.step import ACTIONS, step_drawn
from megatron_run_report.thinned import At, Curve, Point
from tests.report.run_folders import TOPOLOGY

KEYS = {"schedule.use": "1f1b", "parallel.pipeline": 2, "parallel.chunks": 1, "model.num_layers": 4}


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


def test_every_rank_has_a_box_and_tells_its_place() -> None:
    drawn = ranks_drawn(TOPOLOGY)
    assert drawn is not None
    titles = [each.text for each in ElementTree.fromstring(drawn).iter("title")]
    assert titles == [f"rank {each}: stage {each}, tensor 0, data 0; layers {each} | {each + 2}" for each in (0, 1)]
    assert ranks_text(TOPOLOGY) == "world 2 = tensor 1 x pipeline 2 x data 1; 2 chunks per stage"


def test_of_many_ranks_the_first_are_drawn_and_the_text_says_so() -> None:
    ranks = [{"rank": each, "stage": each // 64, "tensor": 0, "data": each % 64} for each in range(64 * 40)]
    topology = {"world": 64 * 40, "tensor": 1, "pipeline": 40, "data": 64, "ranks": ranks}
    drawn = ranks_drawn(topology)
    assert drawn is not None
    assert len([*ElementTree.fromstring(drawn).iter("rect")]) == 16 * 8
    assert ranks_text(topology).endswith("; drawn are the first 16 pipeline, 8 data")


@pytest.mark.parametrize(
    "topology", [{}, {"ranks": 3}, {"ranks": [1, {}, {"rank": "0"}]}, {"world": 2, "tensor": None}]
)
def test_a_topology_of_an_early_version_or_a_stranger_is_not_drawn(topology: dict[str, object]) -> None:
    assert ranks_drawn(topology) is None
    assert ranks_text(topology) == ""


def test_a_step_is_drawn_by_the_installed_schedule() -> None:
    drawn = step_drawn(KEYS, 4)
    assert drawn.picture.startswith("data:image/svg+xml;base64,")
    assert drawn.note == ""


def test_a_step_of_many_microbatches_is_drawn_with_fewer() -> None:
    drawn = step_drawn(KEYS, 5000)
    assert drawn.note == f"drawn with {ACTIONS // 4} of 5000 microbatches"
    assert step_drawn({**KEYS, "parallel.pipeline": 1024}, 5000).note.startswith("a step has more than ")


def test_a_file_that_a_run_names_as_its_schedule_does_not_run(tmp_path: Path) -> None:
    file, ran = tmp_path / "mine.py", tmp_path / "ran"
    file.write_text(f"open({str(ran)!r}, 'w')\n")
    drawn = step_drawn({**KEYS, "schedule.use": str(file)}, 4)
    assert drawn[:2] == ("", f"{file} is a file, and a report runs no file that a run names")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"schedule.use": None}, "the run does not tell its schedule"),
        ({"schedule.use": "of-a-stranger"}, "no installed plugin is schedule=of-a-stranger"),
        ({"schedule.old_option": 3}, "its options are those of another version"),
        ({"parallel.pipeline": "x"}, "its options are those of another version"),
        ({"model.num_layers": "many"}, "the run does not tell its layers"),
        ({"model.num_layers": 1}, "1 layer"),
    ],
)
def test_a_step_that_cannot_be_drawn_says_why(keys: dict[str, object], why: str) -> None:
    drawn = step_drawn({**KEYS, **keys}, 4)
    assert drawn.picture == ""
    assert why in drawn.note


def test_an_axis_may_begin_at_zero_however_little_its_values_differ() -> None:
    """As that of memory, of which a part is the question."""
    lines = [Line(0, "", curve({1: 0.306, 2: 0.308}), "plain")]
    for from_zero, first in ((True, "0"), (False, "0.306")):
        root = ElementTree.fromstring(chart("Memory", "GiB", lines, may_log=False, from_zero=from_zero))
        ticks = [each.text for each in root.iter("text") if each.get("text-anchor") == "end"]
        assert ticks[0] == first
