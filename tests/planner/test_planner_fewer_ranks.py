"""The planner's layout for the ranks that are left: ``run.elastic=plan``."""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest import mock

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import InputError, PluginError
from megatron_run.planning import resolve
from megatron_run_engine.launch.planned import with_planned_sizes
from megatron_run_planner.devices import read_device
from megatron_run_planner.schedules import Schedules
from megatron_run_planner.task import read_task
from megatron_run_planner.task.fewer_ranks import best_layout

PLAN = Request(
    ("preset:tiny",),
    values={"run.elastic": "plan", "train.global_batch_size": 12, "train.micro_batch_size": 2, "optimizer": "zero1"},
)


@pytest.mark.parametrize(("gpu", "name"), [("NVIDIA H100 80GB HBM3", "h100"), ("", "cpu-2core")])
@pytest.mark.parametrize("there", [1, 3, 4])
def test_no_layout_of_as_many_ranks_or_fewer_is_predicted_to_be_faster(there: int, gpu: str, name: str) -> None:
    """The step of what is chosen beside each split of every number of ranks."""
    settings = best_layout(PLAN, there, gpu)
    run = resolve(replace(PLAN, values={**PLAN.values, **settings}, there=there))
    assert run.sizes.world <= there
    assert run.config.train.micro_batch_size == 2
    assert run.one("optimizer").name == "zero1"
    device, schedules, found = read_device(name), Schedules(), {}
    for ranks in range(1, there + 1):
        task = replace(read_task(PLAN, None), optimizers=("zero1",))
        try:
            best = task.search(ranks, device, schedules, micro_batches=(2,)).run().best[0]
        except InputError:  # nothing divides
            continue
        found[ranks] = best.step.seconds
    assert found[run.sizes.world] == min(found.values())


def test_the_launcher_asks_for_it_and_only_where_others_decide_how_many_ranks_there_are() -> None:
    assert with_planned_sizes(PLAN) is PLAN
    data = replace(PLAN, values={**PLAN.values, "run.elastic": "data"}, there=3)
    assert with_planned_sizes(data) is data
    run = resolve(with_planned_sizes(replace(PLAN, there=3)))
    assert run.sizes.world + run.spares == 3
    assert any("run.elastic=plan: " in notice for notice in run.notices)


@pytest.mark.parametrize(("device", "gpu"), [("auto", "NVIDIA H100 80GB HBM3"), ("cpu", "")])
def test_it_plans_for_the_device_that_trains(device: str, gpu: str) -> None:
    with (
        mock.patch("megatron_run_engine.launch.planned._gpu", return_value="NVIDIA H100 80GB HBM3"),
        mock.patch("megatron_run_planner.task.fewer_ranks.best_layout", return_value={}) as planned,
    ):
        with_planned_sizes(replace(PLAN, values={**PLAN.values, "run.device": device}, there=3))
    assert planned.call_args.args[1:] == (3, gpu)


def test_without_the_planner_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron_run_planner.task.fewer_ranks", None)
    monkeypatch.setitem(sys.modules, "megatron_run_planner", None)
    with pytest.raises(PluginError, match=r"run.elastic=plan asks the planner: .*; type: .*install.*planner"):
        with_planned_sizes(replace(PLAN, there=3))


def test_a_gpu_that_it_does_not_know_is_no_other_one() -> None:
    with pytest.raises(InputError, match=r"no device like .Tesla K80.; set run\.elastic=data"):
        best_layout(PLAN, 2, "Tesla K80")
