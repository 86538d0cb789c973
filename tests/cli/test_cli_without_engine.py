"""The commands where there is no torch: what needs no layers works, the rest says what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

#: Python imports it at its start: the modules that come with the engine cannot be found, in child processes neither.
WITHOUT_ENGINE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "tokenizers", "safetensors"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
INSTALL = f"type: pip install -e {ROOT}/core/engine"


#: Reads a command a line and runs it in a fork of itself, so that what all of them import is imported once.
COMMANDS = """
import json, os, sys
import megatron_run.planning, megatron_run_cli.reports.keys, megatron_run_cli.reports.listing, pydantic, ruamel.yaml
import megatron_run_schedule_1f1b, megatron_run_schedule_interleaved
from megatron_run_cli.__main__ import program

for line in sys.stdin:
    words, folder = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        sys.argv[:] = ["megatron-run", *words]
        for name, descriptor in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder + "." + name, os.O_WRONLY | os.O_CREAT), descriptor)
        program()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class KernelOnly:
    """An interpreter that finds no module of the engine, and runs commands."""

    def __init__(self, folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(WITHOUT_ENGINE)
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMANDS],
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, words: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run the command with ``words`` in ``folder``; what it says goes into files beside that."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([words.split(), str(folder)]), file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        out, err = (folder.with_name(f"{folder.name}.{name}").read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(words, code, out, err)

    def close(self) -> None:
        """End the interpreter."""
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def kernel_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelOnly]:
    made = KernelOnly(tmp_path_factory.mktemp("without_engine"))
    yield made
    made.close()


def test_torch_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_ENGINE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", "import torch"], env=environment, capture_output=True, check=False)
    assert b"No module named 'torch'" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plugins list schedule", "interleaved  megatron-run-schedule-interleaved"),
        ("plugins info schedule=interleaved", "group_size  int  unset  at least 1"),
        ("plugins why schedule", "chosen  sequential"),
        ("plugins why optimizer --plugin optimizer=zero1", "chosen  zero1      megatron-run-optimizer-zero1"),
        ("plugins new schedule zigzag", "plugins check megatron-run-schedule-zigzag"),
        ("plugins check schedule=1f1b", "ok  messages neither deadlock nor swap"),
        ("config explain train.lr", "peak learning rate"),
        ("config show preset:tiny --set model.num_layers=8", "  num_layers: 8 "),
        ("schedule show preset:tiny --plugin schedule=interleaved", "valid: complete, in order, free of deadlock"),
    ],
)
def test_what_needs_no_layers_works(words: str, expected: str, kernel_only: KernelOnly, tmp_path: Path) -> None:
    done = kernel_only.run(words, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert expected in done.stdout


def test_a_dry_run_plans_all_but_the_sizes(kernel_only: KernelOnly, tmp_path: Path) -> None:
    words = "preset:tiny --dry-run --plugin schedule=interleaved --plugin parallel-layer=tensor --set parallel.tensor=2"
    done = kernel_only.run(words, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "topology: world 4 = tensor 2 x pipeline 2 x data 1; 2 chunks per stage" in done.stdout
    assert "  ranks 2-3  stage 1  tensor 0-1  layers 1 | 3" in done.stdout
    assert "\none step\nstage 0 |" in done.stdout
    (notice,) = (line for line in done.stdout.splitlines() if "without the engine" in line)
    assert notice.startswith("note: scaler=none, optimizer=adamw, parallel-layer=tensor, data=mock ")
    assert notice.endswith("cannot be loaded without the engine: options are not checked")
    last = done.stdout.splitlines()[-1]
    assert last == f"parameters, memory and graphs are known with the engine only; {INSTALL}"


def test_a_dry_run_as_data_keeps_options_as_they_were_written(kernel_only: KernelOnly, tmp_path: Path) -> None:
    words = "preset:tiny --dry-run --json --set model.num_layers=8 --set optimizer.made_up=no,thing"
    told = json.loads(kernel_only.run(words, tmp_path).stdout)
    assert told["config"]["model"]["num_layers"] == 8
    assert told["config"]["optimizer"]["made_up"] == "no,thing"
    assert told["topology"]["ranks"][0]["layers"] == [list(range(8))]
    assert "parameters" not in told
    assert INSTALL in told["notices"][-1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("preset:tiny --dry-run --set train.global_batch_size=3", "train.global_batch_size=3"),
        ("preset:tiny --dry-run --set train.min_lr=1", "train.min_lr=1: it must be at most train.lr"),
        ("preset:tiny --dry-run --set model.num_layers=null", "model.num_layers=null: it must be a whole number"),
        ("preset:tiny --dry-run --set parallel.tensor=2", "parallel-layer=dense does not"),
        ("preset:tiny --dry-run --plugin schedule=1f1b,made_up=1", "unknown key schedule.made_up"),
    ],
)
def test_what_the_kernel_knows_is_still_checked(words: str, line: str, kernel_only: KernelOnly, tmp_path: Path) -> None:
    done = kernel_only.run(words, tmp_path)
    assert done.returncode == 2
    assert line in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "plugins info model=bert",
        "plugins check optimizer=adamw",
        "config explain optimizer.rule",
        "config explain optimizer.rule preset:tiny",
        "import here there",
        "--nproc gpus",
    ],
)
def test_what_needs_the_engine_says_so_in_one_line(words: str, kernel_only: KernelOnly, tmp_path: Path) -> None:
    done = kernel_only.run(words, tmp_path)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith("megatron-run: ")
    assert "need" in line
    assert line.endswith(INSTALL)


def test_the_schema_has_what_can_be_loaded_and_names_the_rest_once(kernel_only: KernelOnly, tmp_path: Path) -> None:
    done = kernel_only.run("config schema", tmp_path)
    assert "group_size" in json.loads(done.stdout)["properties"]["schedule"]["anyOf"][1]["properties"]
    (line,) = done.stderr.splitlines()
    assert "model=bert" in line
    assert "model=gpt" not in line, "its options need no torch"
    assert line.endswith(f"are not known: these plugins need the engine; {INSTALL}")
