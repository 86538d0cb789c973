"""Planning where the engine's plugins are not even installed: only their names and what the user wrote are known."""

from __future__ import annotations

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import EngineMissingError, Problems
from megatron_run.planning import ResolvedRun, resolve, resolver
from megatron_run.planning.describe import describe
from megatron_run.registry.discover import Catalog, scan


@pytest.fixture(autouse=True)
def _schedules_are_all_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = Catalog(scan().of_kind("schedule"))
    monkeypatch.setattr(resolver, "scan", lambda: schedules)


def planned(*plugins: str, sets: tuple[str, ...] = ()) -> ResolvedRun:
    return resolve(Request(configs=("preset:tiny",), plugins=plugins, sets=sets), plan_only=True)


def test_built_ins_are_stood_in_for_and_the_plan_is_the_same() -> None:
    run = planned("schedule=interleaved")
    assert (run.sizes.world, sorted(run.plans)) == (2, [4])
    assert [list(place.layers) for place in run.layout] == [[0], [1], [2], [3]]
    assert {str(plugin) for plugin in run.unloaded} == {
        *("scaler=none", "optimizer=adamw", "parallel-layer=dense", "graph-capture=none", "model=gpt", "data=mock"),
        *("observer=console", "observer=jsonl"),
    }
    (line,) = (line for line in describe(run).splitlines() if line.split()[:2] == ["model", "gpt"])
    assert "not installed" in line


def test_a_stand_in_makes_nothing_and_says_what_to_install() -> None:
    (gpt,) = planned().plugins["model"]
    with pytest.raises(EngineMissingError, match=r"pip install -e \./core/engine"):
        gpt.create()


def test_sizes_that_a_known_plugin_serves_can_be_planned() -> None:
    run = planned("schedule=1f1b", sets=("parallel.expert=2", "model.experts.count=4", "parallel.pipeline=2"))
    assert (run.sizes.expert, run.sizes.world) == (2, 4)
    with pytest.raises(Problems, match=r"parallel\.tensor=2 needs a plugin that serves it: parallel-layer=dense"):
        planned(sets=("parallel.tensor=2",))


def test_a_plugin_that_nobody_knows_is_still_an_error() -> None:
    with pytest.raises(Problems, match=r"no installed plugin is optimizer=mine .*; installed: none") as caught:
        planned("optimizer=mine")
    assert not any(isinstance(problem, EngineMissingError) for problem in caught.value.problems)


def test_a_run_that_is_to_be_trained_needs_them() -> None:
    with pytest.raises(Problems) as caught:
        resolve(Request(configs=("preset:tiny",)))
    missing = [problem for problem in caught.value.problems if isinstance(problem, EngineMissingError)]
    assert {problem.exit_code for problem in missing} == {3}
    assert str(missing[0]).startswith("no installed plugin is scaler=none (from default); pip install -e ./core/engine")
