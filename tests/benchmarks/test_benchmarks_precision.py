"""The committed curves: the picture is drawn from the data, and the data reaches the goals."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.precision.__main__ import AFTER_SKIPS, DATA, PICTURE, TOLERANCE
from benchmarks.precision.curves import RUNS, Curve, apart, learned, read, read_csv, write_csv
from benchmarks.precision.draw import picture


def test_the_committed_picture_is_that_of_the_committed_data() -> None:
    drawn = picture(read_csv(DATA))
    assert PICTURE.read_text("utf-8") == drawn
    lines = [line.get("points", "").split() for line in ElementTree.fromstring(drawn).iter() if "points" in line.attrib]
    assert [len(points) for points in lines] == [200] * len(RUNS)


def test_the_committed_losses_reach_the_goals() -> None:
    curves = read_csv(DATA)
    assert list(curves) == list(RUNS)
    fp32 = curves["fp32"]
    for curve in curves.values():
        assert abs(apart(curve, fp32)) <= (AFTER_SKIPS if any(curve.skipped) else TOLERANCE)
        assert learned(curve) < curve.losses[0] - 2
    walked = curves["fp16, from 2^32"]
    assert walked.scales[0] == 2.0**32
    assert all(walked.skipped[:16])
    assert sum(walked.skipped) < 20


def test_what_is_behind_is_compared_with_as_many_updates() -> None:
    fp32 = Curve(tuple(map(float, range(100, 0, -1))), (False,) * 100, (1.0,) * 100)
    late = Curve((100.0, *fp32.losses[:-1]), (True, *[False] * 99), (1.0,) * 100)
    assert learned(fp32) == pytest.approx(13.0)
    assert apart(late, fp32) == 0.0
    assert apart(fp32, fp32) == 0.0


def test_curves_are_read_from_a_run_and_survive_the_file(tmp_path: Path) -> None:
    steps = [{"loss": 3.0, "skipped": True, "loss_scale": 8.0}, {"loss": 2.5, "skipped": False, "loss_scale": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)), encoding="utf-8")
    curve = read(tmp_path)
    assert curve == Curve((3.0, 2.5), (True, False), (8.0, 4.0))
    write_csv(tmp_path / "curves.csv", {"a": curve, "b": curve})
    assert read_csv(tmp_path / "curves.csv")["b"] == curve
