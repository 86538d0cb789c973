"""Measurements of a machine: each names what it timed, in order, and no rank of a failed one is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import InputError
from megatron_run.planning import resolve
from megatron_run_engine.estimate.calibration.microbenchmarks import (
    time_attention,
    time_products,
    time_sums,
    time_sweeps,
    time_together,
)
from megatron_run_engine.estimate.calibration.on_ranks import RankCall, on_ranks
from megatron_run_engine.estimate.calibration.survey import (
    ANCHORS,
    ATTENTION,
    MESSAGES,
    PRODUCTS,
    SWEEPS,
    Round,
    read_round,
    runs,
    spans,
    summary,
    surveyed,
    tasks,
)
from megatron_run_engine.estimate.calibration.timed_run import time_request, time_run
from megatron_run_engine.runtime.world import World

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
        time_sweeps([2**12, 2**22]),
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
        assert run.config.train.global_batch_size == 4 * run.config.train.micro_batch_size * run.sizes.data


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


def test_what_several_ranks_do_takes_as_long_as_on_the_slowest() -> None:
    """Rank ``r`` takes ``1 + r`` seconds for everything."""

    def took(task: RankCall, rank: int) -> Any:
        if task.function is time_request:
            return {"wall": [9.0, 9.0, 1.0 + rank], "processor": [], "actions": []}
        return 1.0 + rank if task.function is time_together else [1.0 + rank] * len(MESSAGES)

    results = [[took(task, rank) for rank in range(task.ranks)] for task in tasks()]
    found = read_round(results)
    assert [steps[-1] for steps in found.anchors] == [float(each.ranks) for each in ANCHORS]
    assert found.messages == [(world, size, float(world)) for world in (2, 4) for size in MESSAGES]
    assert found.together == [(2, 2.0), (1, 4.0), (3, 4.0), (4, 4.0)]
    assert {(members, world, seconds) for members, world, _, seconds in found.sums} == {(2, 2, 2), (2, 4, 4), (4, 4, 4)}


@pytest.mark.nightly
def test_ranks_measure_together_and_fail_together() -> None:
    """One start serves tasks of one, two and three ranks; the others sleep until they have something to do."""
    begun: list[int] = []
    sums = RankCall(2, time_sums, {"sizes": [64, 2**22], "members": 2})
    alone, all_three = (
        RankCall(1, time_sweeps, {"sizes": [2**12]}),
        RankCall(3, time_together, {"active": 3, "seconds": 0.1}),
    )
    found = on_ranks([alone, sums, all_three, alone], begun.append)
    assert [len(ranks) for ranks in found] == [1, 2, 3, 1]
    assert all(0 < small < large for small, large in found[1])
    assert begun == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"rank [01] of a measurement failed"):
        on_ranks([RankCall(2, time_sums, {"sizes": ["none"], "members": 2}), all_three])
