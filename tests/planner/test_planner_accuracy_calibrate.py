"""A survey of a machine that is known: its description says what was measured, and reads back as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run_planner.accuracy.calibrate import Survey, describe, device_text, model_of
from megatron_run_planner.devices import Cores, Device, read_device
from megatron_run_planner.step_time import after_backward, place_times, step_time
from tests.planner.surveyed import SHAPES, TRUE, anchored, plan_of, surveyed


@pytest.fixture(scope="module")
def survey() -> Survey:
    return surveyed(TRUE)


@pytest.fixture(scope="module")
def found(survey: Survey) -> Device:
    return describe(survey, "found")


def test_a_description_predicts_the_runs_that_it_was_made_of(survey: Survey, found: Device) -> None:
    assert len(found.layers) == len(SHAPES)
    alone = found.model_copy(update={"cores": Cores(count=1)})
    for run in survey.runs:
        model, split = model_of(run)
        if split.tensor == 1:
            layout = looped_layout(LayoutSpec(1, 1, len(model.layers), ()))
            (times,) = place_times(model, split, alone, layout)
            assert times.forward == pytest.approx(run["forward"], rel=0.06), run
            assert times.backward == pytest.approx(run["backward"], rel=0.06), run
            assert after_backward(model, split, alone, layout)[0] == pytest.approx(run["rest"], rel=0.05)


def test_trainings_on_several_ranks_settle_what_they_cost_each_other(survey: Survey) -> None:
    """The same machine, on which waking a rank takes five times as long as alone measurements say."""
    (late,) = (each._replace(latency=1e-3) for each in TRUE.links.sums)
    slow = TRUE.model_copy(update={"links": TRUE.links.model_copy(update={"sums": (late,)})})
    task, anchors = anchored(slow)
    model, split = task.model, task.split
    predicted = step_time(model, split, describe(surveyed(TRUE, anchors), "found"), plan_of(task)).seconds
    assert predicted == pytest.approx(anchors[0]["seconds"], rel=0.01)
    blind = step_time(model, split, describe(survey, "found"), plan_of(task)).seconds
    assert blind < 0.9 * predicted


def test_a_description_reads_back_as_it_was_written(found: Device, tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    file.write_text(device_text(found, "measured\nhere"), encoding="utf-8")
    assert read_device(str(file)) == found
