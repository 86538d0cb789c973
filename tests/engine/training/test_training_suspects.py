"""What copies that differ are put down to: a machine, or a plugin, which is named with how to try it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_run.registry.choose import choose
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_engine.training.health.suspects import MANY, likely_cause
from tests.support.forked import run_forked, tiny

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"


def chosen(**words: str) -> Mapping[str, tuple[Plugin, ...]]:
    """Plugins by kind, whose hyphens are underscores here; layers are stacked by ``+``."""
    kinds = {kind.replace("_", "-"): word.split("+") for kind, word in words.items()}
    return {kind: tuple(load(choose(scan(), kind, each, "a test"), "a test") for each in kinds[kind]) for kind in kinds}


OURS = {"optimizer": "adamw", "parallel_layer": "dense", "model": "gpt"}


@pytest.mark.parametrize(("differing", "first"), [(1, True), (MANY - 1, True), (MANY, False), (100, False)])
def test_plugins_of_this_project_are_not_blamed_for_what_a_machine_does(differing: int, first: bool) -> None:
    found = likely_cause(chosen(**OURS), differing, first=first)
    assert found.why == "a memory, a link or a kernel failed"
    assert found.fix.startswith("run again to resume from the last saved step; leave that machine out")


def test_they_are_suspected_where_many_tensors_differ_from_the_start() -> None:
    found = likely_cause(chosen(**OURS), MANY, first=True)
    for name in ("optimizer=adamw", "parallel-layer=dense", "model=gpt"):
        assert f"{name} of megatron-run-engine " in found.why
        assert f"megatron-run plugins check {name}" in found.fix


@pytest.mark.parametrize("first", [True, False])
def test_a_plugin_of_somebody_else_is_named_with_how_to_try_it(first: bool) -> None:
    optimizer, layers = EXAMPLES / "optimizer.py", EXAMPLES / "parallel_layer.py"
    found = likely_cause(
        chosen(**{**OURS, "optimizer": str(optimizer), "parallel_layer": f"tensor+{layers}"}), 1, first=first
    )
    assert found.why == (
        f"optimizer=optimizer of {optimizer} or parallel-layer=parallel_layer of {layers} "
        "may leave out a sum over ranks; else a memory, a link or a kernel failed"
    )
    assert found.fix.startswith(
        f"type megatron-run plugins check optimizer={optimizer} and "
        f"megatron-run plugins check parallel-layer=tensor+{layers}; if all is well there, run again to resume"
    )


FORGETS = EXAMPLES.joinpath("optimizer.py").read_text(encoding="utf-8").replace("self._peers.size > 1", "False")
DRIFTS = """
import os

import torch


class Drifts(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps >= {start} and os.environ.get("RANK") == "1":
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(1.0)
"""


@pytest.mark.multiproc
def test_a_run_whose_optimizer_forgets_to_reduce_says_which_plugin_to_try(tmp_path: Path) -> None:
    (tmp_path / "forgets.py").write_text(FORGETS)
    ran = run_forked(
        tiny(tmp_path / "run", {"guard.replica_interval": 1}, [f"optimizer={tmp_path}/forgets.py"], nproc=2)
    )
    assert ran.code == 6
    assert "no copy has a majority: optimizer=forgets of " in ran.message
    assert f"type megatron-run plugins check optimizer={tmp_path}/forgets.py; " in ran.message


@pytest.mark.multiproc
@pytest.mark.parametrize(("start", "cause"), [(1, "optimizer=adamw of "), (3, "a memory, a link or a kernel failed")])
def test_only_a_first_comparison_speaks_against_a_plugin(start: int, cause: str, tmp_path: Path) -> None:
    (tmp_path / "drifts.py").write_text(DRIFTS.format(start=start))
    values = {"guard.replica_interval": 1, "optimizer.rule": f"{tmp_path}/drifts.py:Drifts"}
    ran = run_forked(tiny(tmp_path / "run", values, nproc=2))
    assert ran.code == 6
    assert ran.message.startswith(f"after step {start} the copies of ")
    assert f"no copy has a majority: {cause}" in ran.message
    advised = "; with checkpoint.memory_interval a run finds out which rank it is" in ran.message
    assert advised == (start == 3), "of a machine, and not of a plugin"
