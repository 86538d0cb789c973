"""Who holds the others up: times are those of a rank's own work, and ranks are compared with those that do the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_run.contracts.topology import Sizes, Topology
from megatron_run_engine.runtime.comm import Groups
from megatron_run_engine.training.health.stragglers import (
    SECTIONS,
    Straggler,
    Stragglers,
    find_straggler,
    section_seconds,
)
from megatron_run_testing.build_contexts import context_at

NOBODY = dict.fromkeys(SECTIONS, 0.0)


def row(**seconds: float) -> list[float]:
    return [*{**NOBODY, **seconds}.values()]


def test_a_phase_lasts_until_the_next_and_waiting_is_left_out() -> None:
    marks = [
        ("data", 0.0),
        ("forward", 1.0),
        ("collective", 3.0),
        ("forward", 10.0),
        ("send", 11.0),
        ("backward", 20.0),
    ]
    marks += [("optimizer", 24.0), ("observe", 24.5), ("forward", 99.0)]
    spent = section_seconds(marks, lambda start, end: end - start)
    assert spent == row(data=1.0, forward=3.0, backward=4.0, optimizer=0.5)


def test_a_rank_is_compared_with_the_median_of_the_others_of_its_stage() -> None:
    rows = [row(forward=1.0), row(forward=1.2), row(forward=2.5), row(forward=9.0), row(forward=9.5), row(forward=8.0)]
    assert find_straggler(rows, [0, 0, 0, 1, 1, 1], 2.0) == Straggler(2, "forward", 2.5, 1.1)
    assert find_straggler(rows, [0, 0, 0, 1, 1, 1], 2.5) is None


def test_of_two_ranks_the_slower_one_is_compared_with_the_other() -> None:
    rows = [row(backward=2.1), row(backward=1.0)]
    assert find_straggler(rows, [0, 0], 2.0) == Straggler(0, "backward", 2.1, 1.0)


def test_a_rank_that_has_its_stage_to_itself_is_compared_with_all_others() -> None:
    rows = [row(forward=1.0), row(forward=1.1), row(forward=5.0)]
    found = find_straggler(rows, [0, 1, 2], 2.0)
    assert found is not None
    assert found.rank == 2
    assert found.typical == pytest.approx(1.05)


def test_what_costs_next_to_nothing_is_not_worth_a_word() -> None:
    rows = [row(forward=1.0, data=0.001), row(forward=1.0, data=0.05)]
    assert find_straggler(rows, [0, 0], 2.0) is None
    assert find_straggler([*rows[:1], row(forward=1.0, data=0.06)], [0, 0], 2.0) is not None


def test_who_costs_most_is_named() -> None:
    rows = [
        row(forward=1.0, data=0.5),
        row(forward=1.0, data=0.5),
        row(forward=3.0, data=4.0),
        row(forward=9.0, data=0.5),
    ]
    found = find_straggler(rows, [0] * 4, 2.0)
    assert found is not None
    assert (found.rank, found.section) == (3, "forward")


@pytest.mark.parametrize("interval", [4, 25])
def test_the_last_steps_before_a_report_are_timed(interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("megatron_run_engine.training.health.stragglers.time.perf_counter", lambda: float(next(clock)))
    context = context_at(Topology(Sizes(data=2), 1), Groups(), dtype=torch.float32)
    rows: list[Any] = []

    def compare(found: Any, stages: Any, factor: float) -> None:
        rows.append(found)

    stragglers = Stragglers(context, interval, 2.0)
    with mock.patch("megatron_run_engine.training.health.stragglers.find_straggler", compare):
        for step in range(1, 26):
            for name in ("data", "forward", "send", "backward", "optimizer", "observe"):
                stragglers.enter(step, name, "")
            stragglers.report(step)
    assert len(rows) == 25 // interval
    for found in rows:
        assert found == [row(), row(data=1.0, forward=1.0, backward=1.0, optimizer=1.0)]
    assert next(clock) == (25 if interval == 4 else 10) * 6


def test_reports_that_name_the_same_rank_are_counted_while_they_follow_each_other() -> None:
    named = iter([2, 2, 1, 1, 1, None, 1])
    stragglers = Stragglers(context_at(Topology(Sizes(data=2), 1), Groups(), dtype=torch.float32), 4, 2.0)

    def find(*_: Any) -> Straggler | None:
        rank = next(named)
        return None if rank is None else Straggler(rank, "forward", 2.0, 1.0)

    counts = []
    with mock.patch("megatron_run_engine.training.health.stragglers.find_straggler", find):
        for step in range(1, 29):
            stragglers.report(step)
            counts += [stragglers.in_a_row] * (step % 4 == 0)
    assert counts == [1, 2, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(("sizes", "counts"), [(Sizes(data=2, pipeline=2), [1, 2]), (Sizes(pipeline=4), [0, 0])])
def test_a_rank_that_has_its_stage_to_itself_is_named_and_not_counted(sizes: Sizes, counts: list[int]) -> None:
    """Its stage may have more to do than the others."""
    stragglers, found = Stragglers(context_at(Topology(sizes, 0), Groups(), dtype=torch.float32), 1, 2.0), []
    slow = Straggler(3, "forward", 2.0, 1.0)
    with mock.patch("megatron_run_engine.training.health.stragglers.find_straggler", return_value=slow):
        for step in (1, 2):
            assert stragglers.report(step) == slow
            found.append(stragglers.in_a_row)
    assert found == counts


def test_a_rank_alone_is_not_timed() -> None:
    stragglers = Stragglers(context_at(Topology(Sizes(), 0), Groups(), dtype=torch.float32), 1, 2.0)
    stragglers.enter(1, "forward", "")
    assert stragglers.report(1) is None
    assert not stragglers._marks


def test_what_comes_after_a_step_as_an_evaluation_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 100_000, 1000))
    monkeypatch.setattr(
        "megatron_run_engine.training.health.stragglers._clock", lambda _: (lambda: next(now), lambda a, b: b - a)
    )
    context = context_at(Topology(Sizes(data=2), 0), Groups(), dtype=torch.float32)
    stragglers = Stragglers(context, 100, 2.0)
    found: list[list[list[float]]] = []
    monkeypatch.setattr(
        "megatron_run_engine.training.health.stragglers.find_straggler", lambda rows, *_: found.append(rows)
    )

    def steps(first: int, last: int) -> None:
        for step in range(first, last + 1):
            for phase in ("forward", "observe"):
                stragglers.enter(step, phase, "")
            if step == last:
                stragglers.report(last)
            for phase in ("evaluate", "data", "forward") if step % 5 == 0 else ():
                stragglers.enter(step, phase, "")

    steps(1, 100)
    steps(101, 200)
    steps(151, 200)  # the run has gone back
    assert [rows[0][SECTIONS.index("forward")] for rows in found] == [1000.0] * 3
