"""A plan is of the configuration that a run takes: with what its plugins suggest, and the vocabulary of its data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from megatron_run.config.request import Request
from megatron_run.contracts import ModelOptions
from megatron_run.planning import resolve
from megatron_run.planning.schedule_only import Shape, ask_schedule
from megatron_run.registry.known import KNOWN
from megatron_run_engine.training.build import with_vocabulary
from megatron_run_planner.task import read_task
from tests.support import first_party

DATA = """
import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from megatron_run import PluginInfo, hookimpl

class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    vocab_size: int = Field(77, description="token ids")

@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("data", "mine", options=Options, suggests={"train.micro_batch_size": 2})

@hookimpl
def megatron_run_create_data(options):
    from megatron_run_engine.builtin.data.mock import Mock, MockOptions
    return Mock(MockOptions(vocab_size=options.vocab_size))
"""
CASES: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "nothing": (1, ()),
    "tensor": (8, ("parallel-layer=tensor",)),
    "tensor and a schedule": (8, ("parallel-layer=tensor", "schedule=1f1b")),
    "two ways at once": (4, ("schedule=zero-bubble,variant=v",)),
    "chunks": (4, ("schedule=interleaved",)),
    "what is written goes first": (8, ("parallel-layer=tensor", "schedule=gpipe")),
}
SETS = {"what is written goes first": ("parallel.tensor=4", "parallel.pipeline=1")}


def of(name: str) -> Request:
    ranks, plugins = CASES[name]
    return Request(("preset:tiny",), SETS.get(name, ()), plugins, ranks, environment={})


@pytest.mark.parametrize("name", CASES)
def test_the_split_of_a_plan_is_that_of_the_run(name: str) -> None:
    run, task = resolve(of(name)), read_task(of(name), CASES[name][0])
    sizes, split = run.sizes, task.split
    assert (split.tensor, split.pipeline, split.data) == (sizes.tensor, sizes.pipeline, sizes.data)
    assert (split.chunks, split.micro_batch) == (run.config.parallel.chunks, run.config.train.micro_batch_size)
    asked = ask_schedule(of(name), Shape())
    assert (asked.parallel.tensor, asked.parallel.pipeline, asked.parallel.chunks) == (
        *(sizes.tensor, sizes.pipeline),
        run.config.parallel.chunks,
    )
    assert [asked.microbatches] == [*run.plans]


@pytest.mark.parametrize("sets", [(), ("data.vocab_size=90",), ("model.vocab_size=200",)], ids=str)
def test_the_vocabulary_of_a_plan_is_that_of_the_run(sets: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DATA)
    for plugins in ((), (f"data={tmp_path / 'mine.py'}",)):
        request = Request(("preset:tiny",), sets, plugins, environment={})
        run, task = resolve(request), read_task(request, 1)
        assert task.model.vocabulary == cast("ModelOptions", with_vocabulary(run, run.make_data())).vocab_size
        assert "words because" not in task.reading
        assert task.split.micro_batch == run.config.train.micro_batch_size


def test_a_plugin_that_cannot_be_imported_is_none_of_a_plans_business(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError\n")
    plugins = (f"observer={tmp_path / 'broken.py'}", "optimizer=unheard")
    assert read_task(Request(("preset:tiny",), (), plugins, environment={}), 1).split.ranks == 1


def test_the_kernel_knows_what_first_party_plugins_suggest() -> None:
    """The table is made from their own metadata; what a condition adds is known to who imports the plugin alone."""
    imported = ("model", "schedule")
    for plugin in first_party.plugins():
        known: Any = next((each for each in KNOWN if (each.kind, each.name) == (plugin.kind, plugin.name)), None)
        if known is not None:
            assert known.suggests == plugin.info.suggests
            assert plugin.kind in imported or not plugin.info.suggests_with


def test_a_plan_of_tensor_parallel_layers_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from megatron_run_cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules) * 3)"
    )
    words = ["plan", "preset:tiny", "--plugin", "parallel-layer=tensor", "--gpus", "2", "--as-is"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
