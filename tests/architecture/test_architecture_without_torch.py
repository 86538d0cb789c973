"""Kernel, suites, command and a schedule install and work where neither torch nor numpy is."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.docs.consoles import shown
from tests.support.checkout import COMMAND_LINE, KERNEL, MEMBERS, PLANNER, ROOT, TESTING
from tests.support.scratch import Scratch

#: What the engine and the tests' oracles bring, by the first letters of the files in site-packages.
ENGINE_FILES = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "functorch",
    "tensorboard",
    "deepspeed",
    "transformers",
    "megatron",
    "py3langid",
    "accelerate",
    "datasets",
    "pandas",
    "peft",
    "optuna",
)
PAGE = ROOT / "docs" / "without-torch.md"

#: Builds and installs packages. `make test` has the commands without the engine (tests/cli), and what each imports.
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """An environment with the distributions of the README's second line, and no torch."""
    scratch = Scratch(tmp_path_factory.mktemp("bare") / "env", ours=False, hidden=ENGINE_FILES)
    interleaved = next(member for member in MEMBERS if member.name.endswith("schedule-interleaved"))
    chosen = [member.folder for member in (KERNEL, PLANNER, TESTING, COMMAND_LINE, interleaved)]
    done = scratch.pip("install", "--no-index", "--no-build-isolation", "-q", "-c", ROOT / "constraints.txt", *chosen)
    assert done.returncode == 0, done.stderr
    return scratch


def test_nothing_is_missing_and_there_is_no_torch(bare: Scratch) -> None:
    checked = bare.pip("check")
    assert checked.returncode == 0, checked.stdout
    assert "No module named 'torch'" in bare.run("-c", "import torch").stderr
    assert "No module named 'numpy'" in bare.run("-c", "import numpy").stderr


def test_the_page_shows_what_its_commands_print_there(
    bare: Scratch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    consoles = list(shown(PAGE.read_text(encoding="utf-8")))
    assert len(consoles) >= 10
    for console in consoles:
        program, *words = shlex.split(console.command)
        done = bare.command(program, *words)
        printed = (done.stdout + done.stderr).replace(f"{ROOT}/", "./")  # as in the checkout, where nothing is written
        assert console.agrees(printed), f"{console.command}\n{printed}"
