from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

import pytest

from megatron_run.pipeline.picture import COLOURS, phases, schedule_svg
from megatron_run.pipeline.plan import Plan
from tests.support.drawn_plans import interleaved_plan, one_forward_one_backward_plan, plan_of
from tests.support.random_schedules import random_plan

SVG = "{http://www.w3.org/2000/svg}"


def drawn(plan: Plan, title: str = "mine") -> ElementTree.Element:
    return ElementTree.fromstring(schedule_svg(plan, title))


def rectangles(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [each for each in root.iter(f"{SVG}rect") if each.get("class", "").split()[:1] == [kind]]


def titles(elements: list[ElementTree.Element]) -> list[str]:
    return [each.findtext(f"{SVG}title", "") for each in elements]


@pytest.mark.parametrize("plan", [interleaved_plan(), one_forward_one_backward_plan(), *map(random_plan, range(10))])
def test_each_action_is_one_labelled_rectangle_in_its_stage(plan: Plan) -> None:
    root = drawn(plan)
    for stage, actions in enumerate(plan.lists):
        (row,) = (each for each in root.iter(f"{SVG}g") if each.get("id") == f"stage{stage}")
        labels = [title.partition(":")[0] for title in titles(rectangles(row, "action"))]
        assert labels == [str(action) for action in actions]


def test_bars_hold_the_number_of_their_microbatch() -> None:
    numbers = Counter(
        each.text for each in drawn(interleaved_plan()).iter(f"{SVG}text") if each.get("class") == "number"
    )
    assert numbers == {str(microbatch): 4 * 2 * 2 for microbatch in range(8)}  # stages, chunks, F and B


def test_bars_stand_at_their_times() -> None:
    first, second, third, *_ = (place(bar) for bar in rectangles(drawn(one_forward_one_backward_plan(2, 2)), "action"))
    left, unit = first
    assert second == pytest.approx((left + unit, unit), abs=0.05)
    assert third == pytest.approx((left + 4 * unit, 2 * unit), abs=0.05)


def place(bar: ElementTree.Element) -> tuple[float, float]:
    return float(bar.get("x", "")), float(bar.get("width", ""))


def test_every_stage_has_its_phases_below_its_bars() -> None:
    plan = interleaved_plan()
    bands = titles(rectangles(drawn(plan), "phase"))
    assert bands == ["warm-up", "steady", "cool-down"] * 4
    assert all(all(phases(actions)) for actions in plan.lists)


def test_a_phase_without_actions_has_no_band() -> None:
    assert titles(rectangles(drawn(plan_of("F0.0 F1.0 B0.0 B1.0")), "phase")) == ["warm-up", "cool-down"]


def test_the_legend_names_the_operations_that_occur_and_the_chunks() -> None:
    (legend,) = (each for each in drawn(interleaved_plan()).iter(f"{SVG}g") if each.get("id") == "legend")
    names = [each.text for each in legend.iter(f"{SVG}text")]
    assert names == ["forward", "backward", "wait", "warm-up", "steady", "cool-down", "chunk 0", "chunk 1"]


def test_the_legend_of_a_chunk_has_the_colours_in_which_its_operations_are_drawn() -> None:
    picture = drawn(interleaved_plan())
    (legend,) = (each for each in picture.iter(f"{SVG}g") if each.get("id") == "legend")
    swatches = [each.get("fill") for each in legend.iter(f"{SVG}rect")]
    style = picture.findtext(f"{SVG}style", "")
    fills = {
        line[1:3]: line.partition("fill: ")[2].partition(";")[0] for line in style.splitlines() if "fill: #" in line
    }
    assert swatches[-4:] == [fills[name] for name in ("F0", "B0", "F1", "B1")]


def test_chunks_and_operations_have_colours_of_their_own() -> None:
    style = drawn(interleaved_plan()).findtext(f"{SVG}style", "")
    fills = [line.partition("fill: ")[2] for line in style.splitlines() if line[:3] in (".F0", ".F1", ".B0", ".B1")]
    assert len(set(fills)) == 4
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_one_chunk_is_no_plural() -> None:
    texts = [each.text or "" for each in drawn(one_forward_one_backward_plan()).iter(f"{SVG}text")]
    assert any(" x 1 chunk, " in text for text in texts)


def test_a_title_is_escaped() -> None:
    assert drawn(plan_of("F0.0 B0.0"), "a < b & c").findtext(f"{SVG}title") == "a < b & c"
