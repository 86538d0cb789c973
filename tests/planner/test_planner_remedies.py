"""What to turn when a run does not fit: each remedy saves what the planner says, and taking those named is enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_run.config.request import Request
from megatron_run.contracts.costs import FeedForwardCosts
from megatron_run_planner.devices import Device, read_device
from megatron_run_planner.memory import communication, rank_memory, recomputed
from megatron_run_planner.remedies import changes, remedies
from megatron_run_planner.schedules import Schedules
from megatron_run_planner.search import Search
from megatron_run_planner.task import Task, read_task, sized
from megatron_run_planner.workload import ModelSplit

GIB = 2**30
TASK = read_task(Request((sized(13e9),), sets=("parallel.tensor=2", "train.micro_batch_size=2")), 8)


@pytest.fixture(scope="module")
def schedules() -> Schedules:
    return Schedules()


def a100(memory: float) -> Device:
    return read_device("a100").model_copy(update={"memory": memory * GIB})


def needed(task: Task, split: ModelSplit, schedules: Schedules) -> float:
    asked = Search(task.model, split.ranks, split.global_batch, a100(80), schedules)
    return asked.describe(split, "1f1b" if split.pipeline > 1 else "sequential").needed


def test_every_setting_that_saves_is_tried_once() -> None:
    settings = [each for each, _ in changes(TASK.split, TASK, a100(40))]
    assert settings == [
        ("optimizer=zero1",),
        ("optimizer=zero3",),
        ("optimizer.state_on_host=true",),
        ("parallel.sequence=true",),
        ("train.recompute=mlp",),
        ("train.recompute=full",),
        ("train.micro_batch_size=1",),
        ("parallel.tensor=4", "parallel.data=2"),
        ("parallel-layer=tensor+context", "parallel.context=2", "parallel.data=2"),
        ("schedule=1f1b", "parallel.pipeline=2", "parallel.data=2"),
    ]
    assert all(each.ranks == 8 for _, each in changes(TASK.split, TASK, a100(40)))


def test_what_is_turned_already_is_not_proposed() -> None:
    done = replace(TASK.split, tensor=8, context=4, data=1, optimizer="zero3", sequence_parallel=True, recompute="full")
    done = replace(done, micro_batch=1, on_host=True)
    assert [each for each, _ in changes(done, TASK, a100(40))] == [
        ("schedule=1f1b", "parallel.pipeline=2", "parallel.data=1")
    ]


def test_those_that_are_enough_come_first_and_the_fastest_of_them(schedules: Schedules) -> None:
    now = needed(TASK, TASK.split, schedules)
    found = remedies(TASK, a100(75), schedules, now)
    fitting = [each.needed <= 75 * GIB for each in found.alone]
    assert fitting == sorted(fitting, reverse=True)
    assert 0 < sum(fitting) < len(fitting)
    slow = [each.slowdown for each in found.alone if each.needed <= 75 * GIB]
    assert slow == sorted(slow)
    assert found.together is None


def test_state_in_host_memory_takes_the_time_of_its_way_and_of_the_host() -> None:
    """A gradient of 4 bytes and a weight of 2 travel for each of a rank's weights, and 34 bytes are swept for it."""
    host = read_device("a100").host
    searched = Search(TASK.model, 8, TASK.split.global_batch, a100(80), Schedules())
    plain, hosted = (searched.describe(replace(TASK.split, on_host=on), "sequential") for on in (False, True))
    assert [each.optimizer for each in hosted.memory] == [0]
    own = plain.memory[0].optimizer / 12
    assert own == pytest.approx(TASK.model.parameters / TASK.split.tensor, rel=0.06)
    longer = own * (6 / host.copies + 34 / host.updates)
    assert hosted.step.seconds - plain.step.seconds == pytest.approx(longer, rel=0.02)


def test_bytes_that_the_caller_counted_stay_in_the_sum(schedules: Schedules) -> None:
    now = needed(TASK, TASK.split, schedules)
    exact, more = (remedies(TASK, a100(20), schedules, now + extra).alone for extra in (0, 5 * GIB))
    assert {each.settings: each.needed + 5 * GIB for each in exact} == pytest.approx(
        {each.settings: each.needed for each in more}
    )
    zero1 = next(each for each in exact if each.settings == ("optimizer=zero1",))
    assert zero1.needed == pytest.approx(needed(TASK, replace(TASK.split, optimizer="zero1"), schedules))


def test_more_is_shared_out_where_the_task_may_have_it() -> None:
    """Nothing with one copy of the model, and no lending with captured graphs."""
    first = replace(TASK, optimizers=("adamw", "zero1"))
    for task, split, offered in (
        (TASK, replace(TASK.split, optimizer="zero1"), ["zero3"]),
        (TASK, replace(TASK.split, optimizer="zero3"), []),
        (TASK, replace(TASK.split, data=1), []),
        (first, TASK.split, ["zero1"]),
    ):
        settings = [each for (each, *_), _ in changes(split, task, a100(40)) if each.startswith("optimizer=")]
        assert settings == [f"optimizer={each}" for each in offered]


@pytest.mark.parametrize("memory", [40, 30])
def test_several_together_are_enough_where_none_is_alone(schedules: Schedules, memory: float) -> None:
    found = remedies(TASK, a100(memory), schedules, needed(TASK, TASK.split, schedules))
    assert all(each.needed > memory * GIB for each in found.alone)
    assert found.together is not None
    assert found.together.needed <= memory * GIB
    assert found.together.devices == 8
    sets = tuple(each for each in found.together.settings if "." in each)
    plugins = tuple(each for each in found.together.settings if "." not in each)
    base = ("parallel.tensor=2", "train.micro_batch_size=2")
    keys = {each.split("=")[0] for each in sets}
    kept = tuple(each for each in base if each.split("=")[0] not in keys)
    taken = read_task(Request((sized(13e9),), sets=(*kept, *sets), plugins=plugins), 8)
    assert needed(taken, taken.split, schedules) == pytest.approx(found.together.needed)


def test_more_ranks_for_a_sample_are_enough_where_it_is_long(schedules: Schedules) -> None:
    """What is read with the settings has the split that was judged, and its layers: those of tensor ranks stay."""
    sets = ("parallel.tensor=2", "train.sequence_length=16384", "train.global_batch_size=8")
    request = Request((sized(1.3e9),), sets, ("optimizer=zero1", "parallel-layer=tensor"))
    task = read_task(request, 8)
    found = remedies(task, a100(15), schedules, needed(task, task.split, schedules)).alone
    (longer,) = (each for each in found if any("parallel.context=" in setting for setting in each.settings))
    assert longer.settings == ("parallel-layer=tensor+context", "parallel.context=2", "parallel.data=2")
    keys, plugins = longer.settings[1:], ("optimizer=zero1", longer.settings[0])
    taken = read_task(replace(request, sets=(*sets, *keys), plugins=plugins), 8)
    assert taken.split == replace(task.split, context=2, data=2)
    assert needed(taken, taken.split, schedules) == pytest.approx(longer.needed)
    assert longer.needed <= 15 * GIB < needed(task, task.split, schedules)


def test_nothing_is_said_to_be_enough_where_nothing_is(schedules: Schedules) -> None:
    found = remedies(TASK, a100(3), schedules, needed(TASK, TASK.split, schedules))
    assert found.together is None


def test_buffers_are_those_of_messages_gathers_and_experts() -> None:
    model, split = TASK.model, ModelSplit(tensor=4, pipeline=2, micro_batch=3)
    layer, layers = model.layers[0], model.part(range(4))
    whole = 2 * 3 * model.sequence * model.hidden
    assert communication(model, ModelSplit(tensor=4, data=8), layers) == 0
    assert communication(model, split, layers) == 4 * whole
    assert communication(model, replace(split, sequence_parallel=True), layers) == 4 * whole / 4
    assert communication(model, split, layers, [True, False]) == 3 * whole
    assert communication(model, split, layers, [False, True]) == 2 * whole
    routed = replace(model, layers=(replace(layer, parts=(FeedForwardCosts(1, experts=8, top_k=2),)),))
    assert communication(routed, ModelSplit(micro_batch=3, data=4, expert=4), routed.kinds) == 4 * whole
    held = rank_memory(model, split, layers, [True, False], 4)
    assert held.communication == communication(model, split, layers, [True, False])
    full = replace(split, recompute="full")
    assert rank_memory(model, full, layers, [True, False], 4).temporaries > recomputed(layers, full) > 0
