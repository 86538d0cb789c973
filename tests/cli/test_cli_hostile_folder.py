"""The command in a folder whose files are named as Python's and torch's modules are."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from tests.support.commands import COMMAND, run_command

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]
#: Modules that a run imports, some in every rank.
NAMES = ("json", "random", "numpy", "torch", "socket", "hmac", "pydantic", "yaml", "tensorboard", "sitecustomize")
PLUGIN = """
import neighbour
from megatron_run import PluginInfo, hookimpl
from megatron_run.contracts import Observer


class Watch(Observer):
    def on_train_end(self, reason):
        print(neighbour.WORD)


@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("observer", "watch")


@hookimpl
def megatron_run_create_observer():
    return Watch()
"""


# Spawned ranks start as the fork server does: `auto` tries that every time.
@pytest.mark.parametrize("method", ["auto", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_nothing_that_lies_there_runs_but_the_plugin_that_the_user_names(tmp_path: Path, method: str) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    (tmp_path / "watch.py").write_text(PLUGIN)
    (tmp_path / "neighbour.py").write_text("WORD = 'my own neighbour'\n")
    quick = ("--set", "train.steps=1", "--set", "eval.batches=1", "--set", f"run.start_method={method}")
    words = (*COMMAND, "preset:tiny", *quick, "--nproc", "1", "--plugin", "observer=./watch.py")
    done = run_command(words, tmp_path, timeout=150)
    ran = tmp_path / "ran"
    assert not ran.exists(), ran.read_text()
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "my own neighbour" in done.stdout
