"""The repository as a stranger clones it: nothing missing, nothing that names somebody's machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import MEMBERS, ROOT, Member, kept_files

#: A path that exists on one machine only. The look-behind lets relative paths and web addresses through.
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(work|root|home|Users|tmp|opt|mnt|scratch)/\w")
#: A package registry: which one is the user's own choice, made in their pip configuration.
REGISTRY_HOST = re.compile(r"\b(p[y]pi|pythonhosted|anaconda|conda-forge)\.(org|io)\b")


def read_text(file: Path) -> str:
    """The file's text, or nothing when it is not text."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for file in kept_files():
        for number, line in enumerate(read_text(file).splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


def test_git_hides_no_source() -> None:
    sources = [str(member.source / name) for member in MEMBERS for name in member.files]
    command = ["git", "check-ignore", *sources]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, f"ignored: {done.stdout}"


@pytest.mark.parametrize("member", MEMBERS, ids=str)
@pytest.mark.parametrize("name", ["LICENSE", "NOTICE"])
def test_licence_is_the_same_everywhere(member: Member, name: str) -> None:
    assert (member.folder / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_member_introduces_itself(member: Member) -> None:
    text = (member.folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {member.name}\n")
    assert "Part of [megatron-run](" in text
    assert (member.source / member.package / "py.typed").is_file()


def test_no_machine_is_named() -> None:
    assert not lines_with(MACHINE_PATH)


def test_no_registry_is_named() -> None:
    assert not lines_with(REGISTRY_HOST)


@pytest.mark.parametrize("folder", ["home", "tmp", "work"])
@pytest.mark.parametrize("line", ["cd /{}/me", 'path = "/{}/x"', "(/{}/main)"])
def test_machine_path_is_found(line: str, folder: str) -> None:
    assert MACHINE_PATH.search(line.format(folder))


@pytest.mark.parametrize("line", ["./tmp/x", "https://example.com/home/page", "tests/work/x", "~/work/x"])
def test_other_paths_are_let_through(line: str) -> None:
    assert not MACHINE_PATH.search(line)


def test_nothing_large_is_kept() -> None:
    heavy = [file.relative_to(ROOT) for file in kept_files() if file.stat().st_size > 500_000]
    assert not heavy


def test_plugins_of_pytest_that_others_have_installed_are_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("raise RuntimeError('loaded')", "utf-8")
    (tmp_path / "theirs-1.dist-info").mkdir()
    (tmp_path / "theirs-1.dist-info" / "METADATA").write_text("Name: theirs\nVersion: 1\n", "utf-8")
    (tmp_path / "theirs-1.dist-info" / "entry_points.txt").write_text("[pytest11]\ntheirs = theirs\n", "utf-8")
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/kernel/config/test_config_yaml.py")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
