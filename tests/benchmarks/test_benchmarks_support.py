"""What all benchmarks share: ranks that end together, samples that count, tables."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.command import run
from benchmarks.support.compare import compare
from benchmarks.support.goals import Goal, apart_text, goal_table
from benchmarks.support.quiet import busy_seconds, undisturbed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import heading, table
from tests.support.checkout import ROOT
from tests.support.processes import alive

#: A benchmark is a package that runs, or a module.
BENCHMARKS = sorted(
    path.parent.name if path.name == "__main__.py" else path.stem
    for pattern in ("*.py", "*/__main__.py")
    for path in (ROOT / "benchmarks").glob(pattern)
)
NAN, INFINITE = float("nan"), float("inf")


def sum_of_ranks(factor: int) -> int:
    ranks: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, factor * dist.get_rank())
    return sum(rank or 0 for rank in ranks)


def one(*, quick: bool) -> Iterator[str]:
    yield f"one, {quick=}"


def two(*, quick: bool) -> Iterator[str]:
    yield f"two, {quick=}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], ["one, quick=False", "two, quick=False"]),
        (["--quick", "--only", "two"], ["two, quick=True"]),
    ],
)
def test_the_command_runs_the_parts_that_are_asked_for(
    words: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run("numbers", "Numbers", "Counts.", {"one": one, "two": two}, words)
    title, _, command, _, _, *found = capsys.readouterr().out.splitlines()
    assert (title, command.split()) == ("# Numbers", ["python", "-m", "benchmarks.numbers", *words])
    assert found == told


def test_a_benchmark_of_one_part_has_no_parts_to_choose(capsys: pytest.CaptureFixture[str]) -> None:
    run("numbers", "Numbers", "Counts.", one, ["--quick"])
    assert capsys.readouterr().out.splitlines()[-1] == "one, quick=True"
    with pytest.raises(SystemExit):
        run("numbers", "Numbers", "Counts.", one, ["--only", "one"])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_says_what_it_does_and_can_be_quick(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"benchmarks.{name}"
    for program in (module, f"{module}.__main__"):
        if not hasattr(sys.modules.get(program), "__path__"):
            monkeypatch.delitem(sys.modules, program, raising=False)  # another test's, which is not run as a program
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    usage = " ".join(capsys.readouterr().out.split())
    assert f"usage: python -m {module} " in usage
    assert "--quick" in usage
    assert f"`{module}`" in (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")


@pytest.mark.nightly  # as do those of the benchmarks, in processes that import torch anew
@pytest.mark.multiproc
def test_rank_0_hands_back_what_it_found() -> None:
    assert on_ranks(sum_of_ranks, 2, {"factor": 3}) == 3


@pytest.mark.multiproc
def test_all_ranks_end_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell script stands in for Python: rank 1 dies and rank 0 waits, for which neither needs torch."""
    started = tmp_path / "started"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho $$ >> "{started}"\n[ $RANK = 0 ] || exit 7\nexec sleep 600\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(SystemExit, match=r"^sum_of_ranks: rank 1 ended with 7$"):
        on_ranks(sum_of_ranks, 2, {"factor": 3})
    assert not any(alive(int(pid)) for pid in started.read_text().split())


def test_samples_taken_while_something_else_ran_are_dropped() -> None:
    samples = [{"ours_foreign": share, "theirs_foreign": 0.0} for share in (0.3, 0.01, 0.02, 0.0)]
    kept = undisturbed(samples)
    assert (kept.samples, kept.quiet, str(kept)) == (samples[1:], True, "3 of 4")


def test_a_busy_machine_leaves_the_least_disturbed_half_and_says_so() -> None:
    samples = [{"foreign": share} for share in (0.9, 0.2, 0.5, 0.3)]
    kept = undisturbed(samples)
    assert (kept.samples, kept.quiet, str(kept)) == ([samples[1], samples[3]], False, "2 of 4, disturbed")


def test_idle_and_waiting_time_is_not_busy() -> None:
    stat = "cpu  100 20 30 4000 500 6 7 8 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
    assert busy_seconds(stat) == pytest.approx((100 + 20 + 30 + 6 + 7 + 8) / 100)


def test_results_say_what_ran_where() -> None:
    title, command, environment = heading("Pipelines", ("python", "-m", "benchmarks.pipeline"))
    assert (title, command) == ("# Pipelines\n", "    python -m benchmarks.pipeline\n")
    for part in (f"{os.cpu_count()} cores of ", "torch 2.", "commit "):
        assert part in environment


def test_a_table_is_markdown() -> None:
    assert list(table(("a", "b"), [(1, "two")])) == ["| a | b |", "|---|---|", "| 1 | two |"]


def test_a_goal_is_met_at_its_bound_or_on_its_side() -> None:
    sample = {"ours seconds": 1.0, "ours foreign": 0.0, "theirs seconds": 1.5, "theirs foreign": 0.0}
    goals = [Goal("ours", "theirs", "at least", 1.6), Goal("ours", "theirs", "at most", 0.7)]
    assert list(goal_table("this", goals, [sample] * 3))[2:] == [
        "| theirs | 1.500 times its speed | at least 1.60 | no | 3 of 3 |",
        "| theirs | 0.667 of its time | at most 0.70 | yes | 3 of 3 |",
    ]


def test_how_far_sides_lie_apart_is_said_of_those_that_were_compared() -> None:
    assert [apart_text({"apart": {"a": 2e-6, "b": 0.0}}, name) for name in "abc"] == ["2e-06", "equal", "not compared"]


RIGHT = {"zero": torch.zeros(2), "a": torch.tensor([1.0, 4.0])}


def test_how_far_gradients_lie_apart_is_relative_to_the_largest_value_of_each() -> None:
    assert compare(RIGHT, RIGHT) == 0
    assert compare({**RIGHT, "a": torch.tensor([1.0, 4.0 - 2**-17])}, RIGHT) == 2**-19


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"a": torch.tensor([1.0, 3.0])}, "a differs by 2.5e-01"),
        ({"a": torch.tensor([7.0, 28.0])}, r"a differs by 6.0e\+00"),  # after a tensor of which nothing can be told
        ({"zero": torch.tensor([0.0, 1.0])}, "zero differs by"),
        ({"a": torch.tensor([NAN, 4.0])}, "a is not finite"),
        ({"a": torch.tensor([1.0, INFINITE])}, "a is not finite"),
        ({"a": torch.tensor([[1.0, 4.0]])}, r"a is \(1, 2\) on our side and \(2,\) on theirs"),
        ({"b": torch.zeros(1)}, r"the same tensors: \['b'\]"),
    ],
)
def test_a_wrong_gradient_is_refused_on_either_side(wrong: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compare({**RIGHT, **wrong}, RIGHT)


def test_a_gradient_of_theirs_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="a is not finite"):
        compare(RIGHT, {**RIGHT, "a": torch.full((2,), NAN)})


def test_what_is_zero_but_for_rounding_is_measured_against_the_least_scale() -> None:
    noise = {"noise": torch.tensor([1e-9, -2e-9])}, {"noise": torch.tensor([-1e-9, 1e-9])}
    with pytest.raises(ValueError, match="noise differs"):
        compare(*noise)
    assert compare(*noise, least=1.0) == pytest.approx(3e-9)
