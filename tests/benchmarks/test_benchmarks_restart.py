"""The simulation of restarts, beside the closed formula."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from math import exp, expm1
from typing import Any, cast
from unittest import mock

import pytest

from benchmarks.restart import simulation
from benchmarks.restart.effective import productive
from benchmarks.restart.hangs import injected
from benchmarks.restart.victims import Run
from benchmarks.support.command import Number, run
from megatron_run_engine.checkpoint.manifest import decode_manifest


@pytest.mark.parametrize(("down", "every"), [(0.0, 5), (60.0, 5), (3600.0, 5), (60.0, 100)])
def test_the_share_is_that_of_failures_that_come_at_random(down: float, every: int) -> None:
    """Of work W, exponential, the whole copies but the last one stay: c e^(-c/T) / (e^(c/T) - 1) of each T.

    Where copies are far between, the last one shows.
    """
    between, copy = simulation.BETWEEN, every * simulation.STEP
    expected = exp(-down / between) * copy * exp(-copy / between) / expm1(copy / between) / between
    with mock.patch.multiple(simulation, DAYS=20_000, EVERY=every):
        assert simulation.share(down, random.Random(3)) == pytest.approx(expected, rel=0.02)


def test_what_ranks_read_of_a_step_grows_with_them() -> None:
    small, large = (simulation.manifest_of(ranks) for ranks in (4, 64))
    assert (len(small.files), len(large.files)) == (4, 64)
    assert decode_manifest(large.encode(), "manifest") == large
    costs = [simulation.communicators_on(ranks) for ranks in (1024, 2048, 10_000, 16_384)]
    assert [round(each, 1) for each in costs] == [2.5, 5.0, 30.0, 50.1]


def test_productive_are_the_steps_that_stayed_as_long_as_one_takes_that_nothing_disturbs() -> None:
    """Steps 3 to 6 after step 2, of which 4 and 5 were lost and done again; slow ones count no more than others."""
    done = [(2, 1, 99.0), (3, 1, 101.0), (4, 1, 103.0), (5, 1, 105.0), (4, 2, 121.0), (5, 2, 128.0), (6, 2, 135.0)]
    rows = [{"step": step, "attempt": attempt, "time": time, "step_time_s": 7.0} for step, attempt, time in done]
    found = productive(rows, first=2, began=100.0, wall=40.0, step=2.0)
    assert (found.stayed, found.anew) == (4, 2)
    assert found.share == pytest.approx(4 * 2.0 / 40.0)


class Watched:
    """A run that was watched: the rows of its metrics, and the records of its restarts."""

    def __init__(self, rows: list[tuple[int, int]], seconds: dict[str, float]) -> None:
        self._rows = [{"step": step, "attempt": attempt, "step_time_s": float(step)} for step, attempt in rows]
        self._seconds = seconds

    def rows(self) -> list[dict[str, Any]]:
        return self._rows

    def restart(self, attempt: int) -> dict[str, Any]:
        return {"seconds": {**self._seconds, "detection": 8.0 + attempt}}

    def wait_for(self, condition: Any) -> None:
        assert condition()


def test_a_restart_after_a_hang_is_that_of_the_next_attempt() -> None:
    rows = [(1, 1), (2, 1), (3, 1), (3, 2), (4, 2), (5, 2), (4, 3)]
    found = [*injected(cast("Run", Watched(rows, {"load": 1.0})))]
    assert [each.seconds for each in found] == [{"load": 1.0, "detection": 10.0}, {"load": 1.0, "detection": 11.0}]
    assert [(each.lost, each.step) for each in found] == [(1, 2.0), (2, 4.0)]


def test_a_number_that_is_typed_reaches_its_part_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def part(name: str, **given: object) -> Iterator[str]:
        yield f"{name}: {sorted(given)} {given.get('minutes', '')}".strip()

    parts = {name: partial(part, name) for name in ("one", "other")}
    for words in (["--minutes", "3"], []):
        run("restart", "Restarts", "", parts, words, Number("minutes", "other", "work"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("one", "other"))]
    assert lines == ["one: ['quick']", "other: ['minutes', 'quick'] 3", "one: ['quick']", "other: ['quick']"]
