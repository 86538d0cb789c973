"""Repeated runs of the tests: which runs are made, in which order of files, and what is told of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.series.__main__ import main, outcome, runs
from tests.series.shuffled import SEED, pytest_collection_modifyitems


def make(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a ``make`` in the place of the real one."""
    (folder / "make").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "make").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr("tests.series.__main__.resource.setrlimit", lambda *_: None)
    monkeypatch.setattr("tests.series.__main__.signal.signal", lambda *_: None)


def test_each_number_of_workers_has_runs_in_the_usual_order_and_in_random_ones() -> None:
    twenty = runs(20, 7)
    assert {(run.workers, run.seed is None) for run in twenty} == {(4, True), (4, False), (2, True), (2, False)}
    assert len({run.seed for run in twenty}) == 11, "each random order is another"


def test_a_run_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f'[ -z "${SEED}" ] && echo "3 passed in 1.20s (0:00:01)" && exit 0\necho FAILED tests/a.py::one - no\n'
    make(tmp_path, monkeypatch, f'{script}echo "1 failed, 2 passed, 4 skipped in 0.50s"\nexit 2')
    assert main(["--count", "3", "--seed", "40"]) == 1
    seen = capsys.readouterr()
    (first, second, third) = [line for line in seen.out.splitlines() if line.startswith("| ")][1:]
    assert first.startswith("| 1 | the usual | 4 | 3 | 0 | ")
    assert second.startswith("| 2 | the usual | 2 | 3 | 0 | ")
    assert third.startswith("| 3 | seed 42 | 4 | 2 | 1 | ")
    assert seen.err.splitlines() == ["run 3: FAILED tests/a.py::one - no"]


def test_a_run_that_ends_without_tests_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, monkeypatch, "echo E501 Line too long\nexit 2")
    assert main(["--count", "1"]) == 1
    assert capsys.readouterr().err.splitlines() == ["run 1: make test ended with 2", "run 1: E501 Line too long"]


def test_errors_of_files_and_types_count_as_failures() -> None:
    types = "Found 2 errors in 1 file (checked 9 source files)"
    said = f"a.py:1: error: no\n{types}\nERROR tests/b.py::two\n5 passed, 1 error in 2.00s\n"
    assert outcome(said) == (5, [types, "ERROR tests/b.py::two"])


def test_files_are_shuffled_whole_and_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def order(seed: str) -> list[str]:
        monkeypatch.setenv(SEED, seed)
        items: list[Any] = [SimpleNamespace(path=f"test_{number // 3}.py", name=number) for number in range(30)]
        pytest_collection_modifyitems(items)
        assert all(items[at].name + 1 == items[at + 1].name for at in range(30) if at % 3 < 2)
        return [item.path for item in items]

    assert order("1") == order("1") != order("2")
    assert order("") == sorted(order("1"))
