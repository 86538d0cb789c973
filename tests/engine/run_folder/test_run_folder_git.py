"""The commit that a run records: read right, and without running what the repository's configuration names."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_run_engine.run_folder.records import git_record

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
IDENTITY = ("-c", "user.name=me", "-c", "user.email=me@example.org")


def git(folder: Path, *words: str) -> str:
    variables = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", *IDENTITY, *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env=variables).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, in whose folder the user is."""
    folder = tmp_path / "repository"
    (folder / "inner").mkdir(parents=True)
    (folder / "file.txt").write_text("one\n")
    (folder / "inner" / "other.txt").write_text("two\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.chdir(folder / "inner")
    return folder


def test_the_commit_is_named_and_a_tracked_file_that_differs_is_seen(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert git_record() == {"commit": commit, "changed": False}
    (repository / "untracked.txt").write_text("three\n")
    os.utime(repository / "file.txt", (1, 1))
    assert git_record() == {"commit": commit, "changed": False}
    (repository / "file.txt").write_text("another\n")
    assert git_record() == {"commit": commit, "changed": True}
    git(repository, "add", ".")
    assert git_record() == {"commit": commit, "changed": True}


def test_a_second_work_tree_has_a_commit_and_an_index_of_its_own(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repository, "worktree", "add", "-q", str(tmp_path / "second"))
    (tmp_path / "second" / "file.txt").write_text("another\n")
    commit = git(repository, "rev-parse", "HEAD")
    assert git_record() == {"commit": commit, "changed": False}
    monkeypatch.chdir(tmp_path / "second")
    assert git_record() == {"commit": commit, "changed": True}


@pytest.mark.parametrize("commits", [True, False])
def test_where_there_is_no_commit_nothing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    if commits:
        git(tmp_path, "init", "-q")
    assert git_record() is None


def test_no_program_of_the_repository_runs(repository: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    program = tmp_path / "program.sh"
    program.write_text(f"#!/bin/sh\necho \"$0 $*\" >> '{marker}'\ncat\n")
    program.chmod(0o755)
    (repository / ".gitattributes").write_text("*.txt filter=evil diff=evil\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "second")
    submodule = repository / "submodule"
    git(repository, "clone", "-q", str(repository), str(submodule))
    git(repository, "add", "submodule")
    git(repository, "commit", "-q", "-m", "third")
    for folder in (repository, submodule):
        for key in ("core.fsmonitor", "filter.evil.clean", "filter.evil.process", "diff.external", "diff.evil.command"):
            git(folder, "config", key, str(program))
        for hook in ("post-index-change", "fsmonitor-watchman"):
            shutil.copy(program, folder / ".git" / "hooks" / hook)
        (folder / "file.txt").write_text("another\n")
    commit = (repository / ".git" / git(repository, "symbolic-ref", "HEAD")).read_text().strip()
    marker.unlink(missing_ok=True)  # what the commands above have run

    assert git_record() == {"commit": commit, "changed": True}
    assert not marker.exists(), marker.read_text()
    subprocess.run(["git", "diff", "--quiet", "HEAD"], check=False, capture_output=True, cwd=repository)
    assert marker.exists(), "git itself runs it"
