"""Measurements of a machine: each names what it timed, in order, and no rank of a failed one is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import InputError
from megatron_run.planning import resolve
from megatron_run_engine.runtime.world import World
from megatron_run_engine.training.calibration.microbenchmarks import (
    time_attention,
    time_messages,
    time_products,
    time_sums,
    time_sweeps,
)
from megatron_run_engine.training.calibration.on_ranks import Task, on_ranks
from megatron_run_engine.training.calibration.survey import (
    ANCHORS,
    ATTENTION,
    PRODUCTS,
    SWEEPS,
    Round,
    runs,
    spans,
    summary,
    surveyed,
)
from megatron_run_engine.training.calibration.timed_run import time_run

TINY = Request(("preset:tiny",), ("run.threads=1", "train.steps=50"))


def test_a_run_is_timed_action_by_action_in_the_plans_order(tmp_path: Path) -> None:
    times = time_run(TINY, World(), tmp_path, 3)
    plan = resolve(TINY).plans[4]
    assert len(times.wall) == len(times.processor) == len(times.actions) == 3
    for actions, wall in zip(times.actions, times.wall, strict=True):
        assert [name for name, _, _ in actions] == [str(action) for action in plan.lists[0]]
        ends = [moment for _, *both in actions for moment in both]
        assert ends == sorted(ends)
        assert ends[-1] - ends[0] < wall
    told = summary([spans({"actions": times.actions, "processor": times.processor})])
    assert told["forward"] > 0 < told["backward"]
    assert not list(tmp_path.glob("checkpoints/*"))


def test_a_run_that_is_too_short_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 steps"):
        time_run(Request(("preset:tiny",), ("run.threads=1", "train.steps=2", "eval.interval=0")), World(), tmp_path, 3)


def test_larger_operators_take_longer() -> None:
    for seconds in (
        time_products([(16, 16, 16), (256, 512, 512)], "float32"),
        time_sweeps([2**12, 2**24]),
        [sum(both) for both in time_attention([(1, 1, 16, 16), (2, 4, 256, 64)])],
    ):
        assert 0 < seconds[0] < seconds[1]


def test_every_run_of_a_survey_resolves() -> None:
    for run in runs()[::8]:
        sizes = resolve(run.request()).config.train
        assert sizes.global_batch_size == run.micro_batch * run.microbatches


def test_every_training_on_several_ranks_resolves() -> None:
    for anchor in ANCHORS:
        run = resolve(replace(anchor.request(), nproc=anchor.ranks))
        assert run.config.train.global_batch_size == 6 * run.config.train.micro_batch_size * run.sizes.data


def test_rounds_are_pooled_and_what_disturbed_one_is_not_seen() -> None:
    """Three rounds, the second of which took twice as long in all: the survey is that of the others."""

    def measured(slow: float) -> Round:
        step = {"forward": [slow, slow], "backward": [2 * slow], "rest": [slow]}
        sizes = (len(PRODUCTS), len(PRODUCTS[::4]), len(SWEEPS))
        return Round(
            operators=[*([slow] * size for size in sizes), [(slow, 2 * slow)] * len(ATTENTION)],
            runs=[step] * len(runs()),
            sums=[(2, 2, 64, slow)],
            messages=[(2, 64, slow)],
            together=[(1, slow)],
            anchors=[[9.0, 9.0, slow, slow]] * len(ANCHORS),
        )

    found = surveyed([measured(1.0), measured(2.0), measured(1.0)])
    assert found == surveyed([measured(1.0)])
    assert [each["seconds"] for each in found["anchors"]] == [1.0] * len(ANCHORS)
    assert found["runs"][0]["backward"] == 2 * found["runs"][0]["forward"]


@pytest.mark.nightly
def test_ranks_measure_together_and_fail_together() -> None:
    tasks = [Task(time_sums, {"sizes": [64, 2**22], "members": 2}), Task(time_messages, {"sizes": [64]})]
    sums, messages = on_ranks(2, tasks)
    assert len(sums) == len(messages) == 2
    assert all(0 < small < large for small, large in sums)
    with pytest.raises(InputError, match=r"rank [01] of a measurement failed"):
        on_ranks(2, [Task(time_sums, {"sizes": ["none"], "members": 2})])
