"""What a rank says it does: to whom, in which order, and the same collectives on every rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from megatron_run.contracts.activity import BACKGROUND, Activity, Collective, Exchange, PhaseName
from tests.support.ranks import run_ranks
from tests.support.resuming import SMALL


class Ear:
    """Remembers what it is told, in words."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, str, str]] = []

    def __call__(self, step: int, name: PhaseName, detail: object) -> None:
        self.heard.append((step, name, str(detail)))


def test_a_change_is_told_with_its_step_to_the_recorder_first() -> None:
    activity, order = Activity(), []
    activity.recorder = lambda *told: order.append(("recorder", *told))
    activity.listeners += [lambda *told: order.append(("listener", *told))]
    activity.step(3)
    activity.enter("backward", "B1.0")
    assert order == [("recorder", 3, "backward", "B1.0"), ("listener", 3, "backward", "B1.0")]
    assert activity.now == ("backward", "B1.0")


def test_a_phase_within_another_gives_way_to_it_again() -> None:
    activity, ear = Activity(), Ear()
    activity.listeners.append(ear)
    activity.enter("forward", "F0.0")
    with activity.within("data", 0), activity.collective("all-reduce", "tensor", 8):
        pass
    names = [name for _, name, _ in ear.heard]
    assert names == ["forward", "data", "collective", "data", "forward"]


def test_what_fails_within_a_phase_leaves_it_as_it_is() -> None:
    activity = Activity()
    activity.enter("forward")
    with pytest.raises(TimeoutError), activity.within("receive", "x"):
        raise TimeoutError
    assert activity.now == ("receive", "x")


def test_collectives_are_counted_by_scope_and_a_wait_is_no_new_one() -> None:
    activity, ear = Activity(), Ear()
    activity.listeners.append(ear)
    started = [activity.collective("all-reduce", scope, 4) for scope in ("data", "world", "data")]
    for phase in (*started, started[0]):
        with phase:
            pass
    told = [detail for _, name, detail in ear.heard if name == "collective"]
    over = ["1 over data", "1 over world", "2 over data", "1 over data"]
    assert told == [f"all-reduce of 4 values, number {each}" for each in over]


def test_another_thread_has_phases_of_its_own_that_the_listeners_hear() -> None:
    activity, ear, recorder, timer = Activity(), Ear(), Ear(), Ear()
    activity.step(7)
    background = activity.in_background()
    activity.recorder = recorder
    activity.timers.append(timer)
    activity.listeners.append(ear)  # whoever comes later hears both
    activity.enter("forward")
    background.enter("save-flush", "step7")
    assert ear.heard == [(7, "forward", ""), (7, "save-flush", "step7")]
    assert recorder.heard == timer.heard == [(7, "forward", "")]
    assert activity.now == ("forward", "")


def test_work_that_goes_on_is_no_new_entrance() -> None:
    activity, ear, recorder = Activity(), Ear(), Ear()
    activity.recorder = recorder
    activity.listeners.append(ear)
    activity.timers.append(ear)
    activity.step(4)
    activity.enter("save-shard", "step4/rank-00000")
    ear.heard.clear()
    activity.heartbeat()
    activity.heartbeat(("save-rename", "step2"))
    told = [(4, "save-shard", "step4/rank-00000")] * 2 + [(4, "save-rename", "step2")]
    assert (recorder.heard, ear.heard) == (told, [])
    assert activity.now == ("save-shard", "step4/rank-00000"), "what another thread does is not what this one does"


def test_what_another_thread_said_last_can_be_passed_on_and_its_collectives_are_its_own() -> None:
    activity = Activity()
    activity.members["world"] = (0, 1)
    background = activity.in_background()
    assert background.said is None
    activity.collective("all-reduce", "world", 8)
    with background.collective("gather", "world", 3):
        assert background.said == ("collective", Collective("gather", BACKGROUND, 1, 3))
    assert background.said == ("start", "")
    before = background.said
    background.heartbeat()
    assert background.said == before
    assert background.said is not before, "it has said it once more"
    assert activity.members[BACKGROUND] == (0, 1)


def test_details_read_as_a_person_would_say_them() -> None:
    assert str(Collective("broadcast", "world", 12, 1)) == "broadcast of 1 values, number 12 over world"
    assert str(Collective("all-to-all", "expert", 2, 0)) == "all-to-all, number 2 over expert"
    assert str(Exchange("x0 from stage 0 to 1", 5)) == "x0 from stage 0 to 1, rank 5"


def two_steps(rank: int, world: int, request: str) -> tuple[list[tuple[int, str, str]], dict[str, tuple[int, ...]]]:
    """Train two steps with an evaluation and a checkpoint on this rank; what it said, and who takes part in what."""
    from megatron_run.config.request import Request
    from megatron_run.planning import resolve
    from megatron_run_engine.run_folder import RunFolder
    from megatron_run_engine.runtime.world import StopRequest, World
    from megatron_run_engine.training.observers import Observers
    from megatron_run_engine.training.trainer import train_rank
    from tests.support.training import shared_folder

    activity, ear = Activity(), Ear()
    activity.listeners.append(ear)
    nobody: Any = Observers([], mock.Mock())
    with (
        shared_folder(rank, world) as folder,
        mock.patch("megatron_run_engine.training.trainer.start_observers", return_value=nobody),
    ):
        run = resolve(Request.from_json(request))
        train_rank(run, World(rank=rank, size=world), RunFolder(folder, 1, rank), StopRequest(), activity)
    return ear.heard, activity.members


@pytest.fixture(scope="module")
def pipeline_of_two() -> list[tuple[list[tuple[int, str, str]], dict[str, tuple[int, ...]]]]:
    from megatron_run.config.request import Request

    settings = {**SMALL, "model.num_layers": 2, "parallel.pipeline": 2, "train.steps": 2, "train.global_batch_size": 2}
    sets = tuple(f"{key}={value}" for key, value in settings.items())
    request = Request(configs=("preset:tiny",), sets=sets, plugins=("schedule=1f1b",), nproc=2)
    return run_ranks(two_steps, 2, request.to_json())


Story = list[tuple[int, str, str]]


def without_repeats(names: list[str]) -> list[str]:
    return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


@pytest.mark.multiproc
def test_a_step_is_told_from_its_data_to_its_parameters(pipeline_of_two: Any) -> None:
    """The second stage of 1F1B: a receive, a forward and a backward for each of two microbatches."""
    story: Story = pipeline_of_two[1][0]
    told = without_repeats([name for step, name, _ in story if step == 1])
    computed = [(name, detail) for step, name, detail in story if step == 1 and name in ("forward", "backward")]
    actions = [("forward", "F0.0"), ("backward", "B0.0"), ("forward", "F1.0"), ("backward", "B1.0")]
    assert [each for index, each in enumerate(computed) if index == 0 or computed[index - 1] != each] == actions
    order = ["data", "receive", "forward", "backward", "send", "gradient-reduce", "optimizer", "observe"]
    assert [told.index(name) for name in order] == sorted(told.index(name) for name in order)
    assert told.index("optimizer") < told.index("parameter-gather") < told.index("observe")


@pytest.mark.multiproc
def test_the_end_of_a_run_is_told_down_to_the_names_of_a_save(pipeline_of_two: Any) -> None:
    last: Story = [each for each in pipeline_of_two[0][0] if each[0] == 2]
    names = [name for _, name, _ in last]
    order = ["evaluate", "save", "save-shard", "save-manifest", "save-rename", "save-latest", "save-retention", "end"]
    assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)
    assert names[-1] == "end"


@pytest.mark.multiproc
def test_all_ranks_enter_the_same_collectives_in_one_order(pipeline_of_two: Any) -> None:
    stories = [[each for each in story if each[1] == "collective"] for story, _ in pipeline_of_two]
    assert len(stories[0]) > 10
    for scope in ("world", "tie"):
        mine, theirs = ([each for each in story if each[2].endswith(f"over {scope}")] for story in stories)
        assert mine == theirs
        numbers = [int(detail.split("number ")[1].split()[0]) for _, _, detail in mine]
        assert sorted(set(numbers)) == list(range(1, max(numbers) + 1))
    assert [members for _, members in pipeline_of_two] == [{"world": (0, 1), "pipeline": (0, 1), "tie": (0, 1)}] * 2


@pytest.mark.multiproc
def test_a_message_names_the_rank_without_which_it_does_not_arrive(pipeline_of_two: Any) -> None:
    exchanges = [[each for each in story if each[1] in ("send", "receive")] for story, _ in pipeline_of_two]
    assert {detail.rpartition(", ")[2] for _, _, detail in exchanges[0]} == {"rank 1"}
    assert {detail.rpartition(", ")[2] for _, _, detail in exchanges[1]} == {"rank 0"}
