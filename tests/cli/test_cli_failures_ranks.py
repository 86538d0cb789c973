"""What goes wrong between ranks, and what a run survives: the command in forked processes of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from socket import gethostname

import numpy as np
import pytest

from megatron_run_engine.data.indexed_files import IndexedWriter
from tests.support.commands import COMMAND, free_port, run_command, world_of_two
from tests.support.fake_plugins import FakeSite
from tests.support.forked import ForkedCommand, forked_command
from tests.support.plugin_file import schedule_file

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]


def test_a_data_file_that_is_missing_or_empty_is_named_before_the_first_step(tmp_path: Path) -> None:
    for name, text in (("corpus.txt", "text"), ("empty.txt", "")):
        (tmp_path / name).write_text(text)
    for name, says in (
        ("corpus.tx", "does not exist (from data.paths); did you mean 'corpus.txt'?"),
        ("empty.txt", "is empty"),
    ):
        run = ("--set", f"run.folder=run-{name}", "--plugin", f"data=text,paths={name}")
        done = forked_command(("preset:tiny", *run), tmp_path)
        assert done.returncode == 5
        assert done.stderr.splitlines()[-1].startswith(f"megatron-run: data file {name} {says}")
        assert not (tmp_path / f"run-{name}" / "metrics.jsonl").exists()


@pytest.mark.parametrize("wrong", [300, -1])
def test_an_id_outside_the_vocabulary_is_named_by_file_and_byte_before_the_first_step(
    tmp_path: Path, wrong: int
) -> None:
    """It lies in the middle, where a step would read it late."""
    with IndexedWriter(tmp_path / "set", np.int32) as writer:
        writer.add_documents([*[7] * 6000, wrong, *[7] * 1999], [40] * 200)
    options = "data=indexed,paths=set,tokenizer=bytes"
    done = forked_command(("preset:tiny", "--set", "run.folder=run", "--plugin", options), tmp_path)
    assert done.returncode == 5
    said = f"megatron-run: token {wrong} at byte 24000 of set.bin is outside of the vocabulary: it has 257 ids"
    assert done.stderr.splitlines()[-1].startswith(said)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


OBSERVER = """
from megatron_run import PluginInfo, hookimpl
from megatron_run.contracts import Observer

class Clumsy(Observer):
    def on_step_end(self, metrics):
        raise OSError("no space left")

@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("observer", "clumsy")

@hookimpl
def megatron_run_create_observer():
    return Clumsy()
"""
SETS = ("run.threads=1", "run.folder=run", "train.steps=5", "eval.interval=0")
SHORT = ("preset:tiny", *(word for each in SETS for word in ("--set", each)))


def test_an_observer_that_raises_is_named_and_disabled_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "clumsy.py").write_text(OBSERVER)
    done = forked_command((*SHORT, "--plugin", "observer=./clumsy.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "clumsy" in line] == [
        *(f"observer clumsy failed in on_step_end: OSError: no space left ({n} of 3)" for n in (1, 2, 3)),
        "observer clumsy is disabled after 3 failures; training continues",
    ]
    assert "step 5/5  loss" in done.stdout


DIES = """
import os, signal
if os.environ.get("RANK") == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_dies_before_it_joins_ends_the_run_and_is_named(tmp_path: Path) -> None:
    schedule_file(tmp_path / "dies.py")
    (tmp_path / "dies.py").write_text(DIES + (tmp_path / "dies.py").read_text())
    words = ["--plugin", "schedule=./dies.py", "--set", "parallel.pipeline=2"]
    done = forked_command((*SHORT, *words), tmp_path, timeout=60)
    assert done.returncode == 4
    line = done.stderr.splitlines()[-1]
    assert line.startswith("megatron-run: a rank was killed by SIGKILL (rank 1, log: ")


def test_a_rank_that_never_comes_is_named_within_the_time_limit(tmp_path: Path) -> None:
    words = ("--plugin", "schedule=1f1b", "--set", "run.timeout=1")
    done = run_command((*COMMAND, *SHORT, *words), tmp_path, variables=world_of_two(0, free_port()))
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()  # and nothing of torch's beside it
    assert line.startswith("megatron-run: rank 1 of 2 did not join within 1 s")
    assert not (tmp_path / "run").exists()


def different(folder: Path, typed: Sequence[str], first: dict[str, str], second: dict[str, str]) -> list[str]:
    """Start two ranks that differ by their environment; what rank 0 says, once both have ended with exit code 3."""
    port = free_port()
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(ForkedCommand((*SHORT, *typed), folder, **world_of_two(rank, port, **variables)))
            for rank, variables in enumerate((first, second))
        ]
        errors = [process.communicate(timeout=60)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [3, 3]
    assert errors[1] == ""
    assert not (folder / "run").exists()
    head, *table = errors[0].splitlines()
    assert head.startswith("megatron-run: the ranks do not run the same thing: ")
    assert "install the same versions and pass the same arguments on every host" in head
    return table


def test_another_value_on_another_host_is_a_row_with_both_hosts(tmp_path: Path) -> None:
    here = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    (row,) = different(tmp_path, (), here, {**here, "MEGATRON_RUN_SET": "train.seed=7"})
    host = gethostname()
    assert row == f"  train.seed: 1234 on rank 0 ({host}), 7 on rank 1 ({host})"


def test_another_plugin_on_a_rank_is_a_table_of_ranks_and_hosts(tmp_path: Path) -> None:
    schedule_file(tmp_path / "other.py")
    here, there = ({"MEGATRON_RUN_PLUGIN_SCHEDULE": word} for word in ("1f1b", "./other.py"))
    table = different(tmp_path, ("--set", "parallel.pipeline=2"), here, there)
    host = gethostname()
    assert f"  schedule: 1f1b on rank 0 ({host}), other on rank 1 ({host})" in table


def test_another_version_code_or_option_on_a_rank_is_a_row_each(tmp_path: Path) -> None:
    variables = []
    for rank, version in enumerate(("1.0", "1.1")):
        site = FakeSite(tmp_path / version)
        schedule_file(tmp_path / "zigzag.py", options="depth: int = 1")
        site.module("acme", (tmp_path / "zigzag.py").read_text() + f"\nRANK = {rank}\n")
        site.distribution("acme-zigzag", {"schedule": {"zigzag": "acme"}}, version=version)
        variables.append({"PYTHONPATH": str(site.folder), "MEGATRON_RUN_SET": f"schedule.depth={rank}"})
    words = ("--plugin", "schedule=zigzag", "--set", "parallel.pipeline=2")
    table = different(tmp_path, words, *variables)
    host = gethostname()
    assert [row.split()[:3] for row in table] == [
        ["schedule", "code:", table[0].split()[2]],
        ["schedule", "option", "depth:"],
        ["schedule", "version:", "acme-zigzag"],
    ]
    assert table[1] == f"  schedule option depth: 0 on rank 0 ({host}), 1 on rank 1 ({host})"
    assert table[2] == f"  schedule version: acme-zigzag 1.0 on rank 0 ({host}), acme-zigzag 1.1 on rank 1 ({host})"
