"""Set-up by make: once, again when its inputs or its place change, and from the start when it was killed midway.

The Makefile is the real one; Python is a stand-in that writes down what it was asked, so that no package moves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.checkout import MEMBERS, ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

#: Makes an environment by putting itself into it; fails where the file ``fail`` says.
STAND_IN = """#!/bin/sh
echo "$*" >> "{log}"
[ -s "{fail}" ] && case "$*" in *"$(cat "{fail}")"*) exit 1 ;; esac
case "$*" in
  "-m venv --clear .venv") rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"pip list"*) echo megatron-run-core==0.1.0; echo torch==2.13.0 ;;
esac
"""


class Clone:
    """A copy of what set-up reads, with the stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        self.log, self.fail = folder / "log", folder / "fail"
        self.shown = b""
        self.python = folder / "python"
        self.python.write_text(STAND_IN.format(log=self.log, fail=self.fail), encoding="utf-8")
        self.python.chmod(0o755)
        for name in ("Makefile", "constraints.txt", "requirements-dev.txt", "pyproject.toml"):
            self._copy(ROOT / name)
        for member in MEMBERS:
            self._copy(member.folder / "pyproject.toml")

    def _copy(self, file: Path) -> None:
        target = self.folder / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)

    def setup(self) -> list[str]:
        """Run ``make setup``; return what Python was asked, in order, and '' at the end when it failed."""
        self.log.write_text("", encoding="utf-8")
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        command = ["make", "setup", f"PYTHON={self.python}"]
        done = subprocess.run(command, cwd=self.folder, env=outer, capture_output=True, timeout=60, check=False)
        self.shown = done.stdout
        asked = self.log.read_text(encoding="utf-8").splitlines()
        return asked if done.returncode == 0 else [*asked, ""]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def made_anew(asked: list[str]) -> bool:
    return "-m venv --clear .venv" in asked


def installed(asked: list[str]) -> str:
    """The line that installs the members, or nothing."""
    return next((line for line in asked if "-e ./core" in line), "")


def test_a_clean_clone_is_set_up_once(clone: Clone) -> None:
    first = clone.setup()
    assert made_anew(first)
    assert all(f"-e ./{member}" in installed(first) for member in MEMBERS)
    assert clone.setup() == []


@pytest.mark.parametrize(
    "name", ["constraints.txt", "pyproject.toml", "core/kernel/pyproject.toml", "requirements-dev.txt"]
)
def test_set_up_repeats_when_an_input_changes(clone: Clone, name: str) -> None:
    clone.setup()
    with (clone.folder / name).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    again = clone.setup()
    assert installed(again)
    assert not made_anew(again)
    assert clone.setup() == []


def test_touching_an_input_changes_nothing(clone: Clone) -> None:
    clone.setup()
    (clone.folder / "constraints.txt").touch()
    assert clone.setup() == []


def test_members_that_left_are_uninstalled(clone: Clone) -> None:
    clone.setup()
    gone = MEMBERS[-1]
    shutil.rmtree(clone.folder / str(gone))
    again = clone.setup()
    assert f"-e ./{gone}" not in installed(again)
    removal = next(line for line in again if "uninstall -y" in line)
    assert removal.endswith(" megatron-run-core")
    assert again.index(removal) < again.index(installed(again))


def test_a_moved_checkout_gets_a_new_environment(clone: Clone) -> None:
    clone.setup()
    clone.folder = clone.folder.rename(clone.folder.with_name("a new place"))
    assert made_anew(clone.setup())
    assert clone.setup() == []


@pytest.mark.parametrize("where", ["venv --clear", "hatchling", "-e ./core"])
def test_set_up_that_was_cut_short_starts_over(clone: Clone, where: str) -> None:
    clone.fail.write_text(where, encoding="utf-8")
    assert clone.setup()[-1] == ""
    clone.fail.write_text("", encoding="utf-8")
    again = clone.setup()
    assert made_anew(again)
    assert installed(again)
    assert clone.setup() == []


def test_an_update_that_was_cut_short_starts_over(clone: Clone) -> None:
    clone.setup()
    (clone.folder / "constraints.txt").write_text("torch==2.12.0\n", encoding="utf-8")
    clone.fail.write_text("-e ./core", encoding="utf-8")
    assert clone.setup()[-1] == ""
    clone.fail.write_text("", encoding="utf-8")
    assert made_anew(clone.setup())


def test_an_environment_without_its_interpreter_is_made_anew(clone: Clone) -> None:
    clone.setup()
    interpreter = clone.folder / ".venv" / "bin" / "python"
    interpreter.unlink()
    interpreter.symlink_to(clone.folder / "no-such-python")
    assert made_anew(clone.setup())


def test_each_long_installation_is_told_before_it_begins(clone: Clone) -> None:
    clone.setup()
    lines = clone.shown.decode().splitlines()
    told = [line for line in lines if line.startswith(("making", "installing"))]
    assert [line.split()[1] for line in told] == ["the", "torch", "what"]
    for line, package in zip(told[1:], ("hatchling", "requirements-dev.txt"), strict=True):
        assert lines.index(line) < next(number for number, each in enumerate(lines) if f" {package}" in each)
    clone.setup()
    assert b"installing" not in clone.shown
