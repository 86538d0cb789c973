"""Ranks and steps: what is drawn lies where its place says."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_run_report.drawing.ranks import ranks_drawn, ranks_text
from megatron_run_report.drawing.step import ACTIONS, step_drawn
from tests.support.run_folders import TOPOLOGY

KEYS = {"schedule.use": "1f1b", "parallel.pipeline": 2, "parallel.chunks": 1, "model.num_layers": 4}


def test_every_rank_has_a_box_and_tells_its_place() -> None:
    drawn = ranks_drawn(TOPOLOGY)
    assert drawn is not None
    titles = [each.text for each in ElementTree.fromstring(drawn).iter("title")]
    assert titles == [f"rank {each}: stage {each}, tensor 0, data 0; layers {each} | {each + 2}" for each in (0, 1)]
    assert ranks_text(TOPOLOGY) == "world 2 = tensor 1 x pipeline 2 x data 1; 2 chunks per stage"


def test_ranks_of_one_sample_stand_beside_each_other() -> None:
    ranks = [
        {"rank": each, "stage": 0, "tensor": each % 2, "context": each // 2 % 2, "data": each // 4} for each in range(8)
    ]
    topology = {"world": 8, "tensor": 2, "context": 2, "pipeline": 1, "data": 2, "ranks": ranks}
    drawn = ranks_drawn(topology)
    assert drawn is not None
    boxes = [float(each.attrib["x"]) for each in ElementTree.fromstring(drawn).iter("rect")]
    assert boxes == sorted(set(boxes))
    assert ranks_text(topology) == "world 8 = tensor 2 x context 2 x pipeline 1 x data 2"


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
