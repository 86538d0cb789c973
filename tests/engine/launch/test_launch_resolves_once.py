"""However the ranks start, a run is resolved once, and its layers are made once besides those that train."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import ExitCode
from megatron_run_engine.launch import LaunchOptions, launch

#: Layers that note whenever a run is resolved, and whenever they are made.
PLUGIN = """
import os
from pathlib import Path

from megatron_run.contracts import PluginInfo, StackedLayers
from megatron_run.hookspecs import hookimpl


def note(event):
    with Path(os.environ["NOTES"]).open("a") as notes:
        notes.write(f"{event} {os.getpid()}\\n")


def check_config(config, options):
    note("resolved")
    return ()


@hookimpl
def megatron_run_plugin_info():
    provides = frozenset({"parallel.tensor"})  # so that they are made in advance too, to see what they divide
    return PluginInfo("parallel-layer", "noted", provides=provides, check_config=check_config)


@hookimpl
def megatron_run_create_parallel_layer(context, base):
    note(context.device.type)
    return StackedLayers(base)
"""


def noted(folder: Path, patch: pytest.MonkeyPatch, *sets: str, nproc: int = 2, mode: str = "local") -> list[list[str]]:
    """What a start in ``folder`` does, as events with their process."""
    (folder / "noted.py").write_text(PLUGIN, encoding="utf-8")
    patch.setenv("NOTES", str(folder / "notes"))
    sets = (f"run.folder={folder / 'run'}", "train.steps=1", "eval.interval=0", "run.threads=1", *sets)
    plugins = (f"parallel-layer=dense+{folder / 'noted.py'}",)
    asked = Request(("preset:tiny",), sets=sets, plugins=plugins, nproc=nproc)
    result = launch(asked, LaunchOptions(quiet=True, tell=lambda _: None), mode)  # type: ignore[arg-type]
    assert result.code is ExitCode.DONE, result.message
    return [line.split() for line in (folder / "notes").read_text().splitlines()]


def processes(notes: list[list[str]], event: str) -> list[str]:
    return [process for what, process in notes if what == event]


@pytest.mark.multiproc
@pytest.mark.parametrize(("method", "nproc"), [("auto", 2), pytest.param("spawn", 1, marks=pytest.mark.nightly)])
def test_local_ranks_take_over_what_their_launcher_has_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, nproc: int
) -> None:
    notes, launcher = noted(tmp_path, monkeypatch, f"run.start_method={method}", nproc=nproc), str(os.getpid())
    assert processes(notes, "resolved") == [launcher]
    assert set(processes(notes, "meta")) == {launcher}
    ranks = processes(notes, "cpu")
    assert len(ranks) == len(set(ranks)) == nproc


def test_a_rank_of_another_launcher_resolves_its_run_itself_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    notes, here = noted(tmp_path, monkeypatch, nproc=1, mode="torchrun"), [str(os.getpid())]
    assert processes(notes, "resolved") == processes(notes, "cpu") == here
