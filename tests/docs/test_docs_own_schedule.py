"""The walk from an empty folder to a packaged schedule keeps what it promises."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from megatron_run.contracts import Schedule
from megatron_run.contracts.schedule import LayoutSpec, ScheduleSpec
from megatron_run.pipeline.lower import lower
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.simulate import timeline
from megatron_run.pipeline.verify import verify
from megatron_run.registry.discover import Entry
from megatron_run.registry.load import load
from tests.docs.consoles import Shown
from tests.docs.walk import File, steps
from tests.support.checkout import ROOT

PAGE = (ROOT / "docs" / "your-own-schedule.md").read_text(encoding="utf-8")
MINE = ROOT / "tests" / "examples" / "walk" / "mine.py"


def plan(stages: int, microbatches: int) -> Plan:
    schedule = load(Entry("", "mine", str(MINE), location=str(MINE)), "a test").create()
    assert isinstance(schedule, Schedule)
    layout = schedule.layout(LayoutSpec(stages, 2, 2 * stages))
    spec = ScheduleSpec(layout, stages, 2, microbatches)
    return verify(spec, schedule.actions(spec))


def test_the_schedule_is_the_first_file_and_has_at_most_forty_lines() -> None:
    first = next(step for step in steps(PAGE) if isinstance(step, File))
    assert first == File("mine.py", MINE.read_text(encoding="utf-8"))
    assert len(first.text.splitlines()) <= 40


def test_the_walk_ends_with_the_installed_plugin() -> None:
    *_, last = (step for step in steps(PAGE) if isinstance(step, Shown))
    assert last.command.startswith("megatron-run --plugin schedule=mine")


@pytest.mark.parametrize("stages", range(1, 7))
def test_time_and_memory_are_what_the_page_says(stages: int) -> None:
    for microbatches in range(stages, 25):
        made = plan(stages, microbatches)
        assert timeline(made).makespan == 6 * microbatches + 4 * (stages - 1)
        assert max(made.peak_in_flight) == min(2 * stages, 2 * microbatches)
        assert made.ascending


def test_twice_the_messages_of_1f1b_cross_between_two_stages() -> None:
    made = plan(4, 8)
    sent = [
        message for stage in range(4) for step in lower(made, stage) if (message := step.send) and not message.local
    ]
    between = Counter(frozenset((message.source, message.target)) for message in sent)
    assert set(between.values()) == {4 * 8}


def test_the_first_stage_has_the_embedding_and_the_output() -> None:
    made = plan(4, 8)
    assert made.layout[0].stage == made.layout[-1].stage == 0


def test_the_page_has_a_step_for_each_thing_that_it_promises() -> None:
    commands = " ".join(step.command for step in steps(PAGE) if isinstance(step, Shown))
    promised = ("schedule show", "--svg", "--trace", "plugins check", "plugins new", "pip install")
    assert [words for words in promised if words in commands] == list(promised)
    assert re.search(r"--plugin schedule=\./mine\.py(?! --stages)", commands), "the file itself trains"
