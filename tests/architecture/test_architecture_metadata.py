"""What is installed is what the tree says; when not, set-up has to run again."""

from __future__ import annotations

from importlib.metadata import distribution, distributions
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.checkout import MEMBERS, Member


def declared_points(member: Member) -> set[tuple[str, str, str]]:
    groups = {**member.project.get("entry-points", {}), "console_scripts": member.project.get("scripts", {})}
    return {(group, name, value) for group, points in groups.items() for name, value in points.items()}


def requirements(lines: list[str] | None) -> set[tuple[str, str]]:
    """Normalised name and versions of each line: ``ruamel.yaml`` and ``ruamel-yaml`` are one."""
    parsed = [Requirement(line) for line in lines or []]
    return {(canonicalize_name(one.name), str(one.specifier)) for one in parsed}


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_installed_metadata_is_the_tree(member: Member) -> None:
    found = distribution(member.name)
    assert found.metadata["Name"] == member.name
    assert found.version == member.project["version"]
    assert found.metadata["Summary"] == member.project["description"]
    assert found.metadata["Requires-Python"] == member.project["requires-python"]
    assert {(point.group, point.name, point.value) for point in found.entry_points} == declared_points(member)
    extras = member.project.get("optional-dependencies", {}).values()
    assert requirements(found.requires) == requirements([*member.project["dependencies"], *chain(*extras)])


def test_nothing_else_of_ours_is_installed() -> None:
    installed = {canonicalize_name(found.metadata["Name"]) for found in distributions()}
    assert {name for name in installed if name.startswith("megatron-run")} == {member.name for member in MEMBERS}
