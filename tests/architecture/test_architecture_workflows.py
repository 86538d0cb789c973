"""Workflows and hooks name what is there: targets of the Makefile, files, versions that are pinned or promised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from ruamel.yaml import YAML

from tests.support.checkout import KERNEL, MEMBERS, ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
#: A target or a file that is named in a step; what the steps make themselves is not there.
_MAKE = re.compile(r"\bmake ([a-z][\w-]*|\$\{\{ matrix\.target \}\})")
_PATH = re.compile(r"(?<![\w$./{-])(?:\.?[\w-]+/)+[\w.-]+")
_MADE = ("dist", "site", ".venv")
#: What takes minutes or hours, and so runs at night only.
_LONG = {"grid", "graph-grid", "context-grid", "sharded-grid", "compose", "campaigns", "mutants", "nightly"}


def read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = YAML(typ="safe").load(file.read_text(encoding="utf-8"))
    return content


def targets() -> set[str]:
    """What can be made: the first words of the rules of the Makefile."""
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def steps(workflow: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each job of ``workflow`` with each of its steps."""
    for job in read(workflow)["jobs"].values():
        for step in job["steps"]:
            yield job, step


def matrix(name: str) -> list[str]:
    jobs = read(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"].values()
    (values,) = (job["strategy"]["matrix"][name] for job in jobs if name in job.get("strategy", {}).get("matrix", {}))
    return list(values)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_asks_for_little_and_ends(workflow: Path) -> None:
    content = read(workflow)
    assert content["name"] == workflow.stem
    assert content["on"]
    assert content["permissions"]["contents"] == "read"
    for job in content["jobs"].values():
        assert job["timeout-minutes"] <= 360
        assert job["runs-on"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned_by_major_version(workflow: Path) -> None:
    used = [step["uses"] for _, step in steps(workflow) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", action) for action in used)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_steps_name_what_is_there(workflow: Path) -> None:
    for _, step in steps(workflow):
        command = step.get("run", "")
        made = {target for target in _MAKE.findall(command) if not target.startswith("$")}
        assert made <= targets()
        named = [path for path in _PATH.findall(command) if not path.startswith(_MADE)]
        named += str(step.get("with", {}).get("cache-dependency-path", "")).split()
        assert not [path for path in named if not (ROOT / path).exists()]


def test_every_change_is_tested_as_a_contributor_would() -> None:
    assert {step.get("run") for _, step in steps(ROOT / ".github" / "workflows" / "test.yml")} >= {"make test"}


def test_at_night_runs_all_that_takes_long() -> None:
    assert set(matrix("target")) == _LONG & targets()


def test_at_night_runs_every_promised_python_and_the_oldest_torch() -> None:
    promised = SpecifierSet(KERNEL.project["requires-python"])
    assert all(promised.contains(version) for version in matrix("python"))
    assert set(matrix("python")) == {"3.12", "3.13"}
    (oldest,) = {
        match[1]
        for member in MEMBERS
        for requirement in member.project["dependencies"]
        if (match := re.match(r"torch>=([\d.]+)", requirement))
    }
    jobs = read(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]
    assert jobs["oldest-torch"]["env"]["TORCH"] == oldest


def test_a_release_is_published_without_a_token() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert "make wheels" in [step.get("run") for step in jobs["build"]["steps"]]  # all of MEMBERS, and the root
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["build"]["env"]["LOCKED"] == "1"
    used = [step.get("uses", "") for step in jobs["build"]["steps"]]
    (attested,) = (at for at, action in enumerate(used) if action.startswith("actions/attest-build-provenance@"))
    assert attested < next(at for at, action in enumerate(used) if action.startswith("actions/upload-artifact@"))
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", FORMS, ids=lambda file: file.name)
def test_a_form_can_be_filled_in(form: Path) -> None:
    content = read(form)
    assert content["name"]
    assert content["description"]
    names = [field["id"] for field in content["body"]]
    assert names
    assert len(names) == len(set(names))
    assert all(field["attributes"]["label"] for field in content["body"])


def hooks() -> dict[str, dict[str, Any]]:
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    return {hook["id"]: hook for hook in local["hooks"]}


def test_hooks_are_pinned_to_what_the_tests_use() -> None:
    pinned = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    for hook in hooks().values():
        for requirement in hook.get("additional_dependencies", []):
            assert "==" in requirement
            assert not requirement.startswith("ruff") or requirement in pinned
    makes = [hook["entry"] for hook in hooks().values() if hook["language"] == "system"]
    assert set(_MAKE.findall(" ".join(makes))) <= targets()


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("x" * 72 + "\n", False),
        ("x" * 73 + "\n", True),
        ("Short\n\n" + "x" * 100 + "\n", False),
    ],
)
def test_the_subject_of_a_commit_is_measured_and_its_body_is_not(message: str, refused: bool) -> None:
    hook = hooks()["subject"]
    assert (hook["language"], hook["args"], hook["stages"]) == ("pygrep", ["--multiline"], ["commit-msg"])
    found = re.search(hook["entry"], message, re.MULTILINE | re.DOTALL)  # as pre-commit searches
    assert (found is not None) == refused
