"""One name, derivable everywhere: folder -> distribution -> import package -> entry point -> tests."""

from __future__ import annotations

import pytest

from megatron_run.contracts import KINDS, entry_point_group
from megatron_run.contracts.plugin import COMMAND
from megatron_run.registry.known import KNOWN
from tests.support.checkout import (
    COMMAND_LINE,
    ENGINE,
    KERNEL,
    MEMBERS,
    PLUGINS,
    ROOT,
    UPON,
    Member,
    read_project,
)

#: Import packages of these names would shadow others, or claim somebody else's name.
FORBIDDEN = {"megatron", "core", "cli", "plugins"}


def test_kernel_engine_suites_and_command_line() -> None:
    assert (KERNEL.name, KERNEL.package) == ("megatron-run-core", "megatron_run")
    assert (ENGINE.name, ENGINE.package) == ("megatron-run-engine", "megatron_run_engine")
    for each in UPON:
        name = each.folder.name
        assert (each.name, each.package) == (f"megatron-run-{name}", f"megatron_run_{name}")
    assert (COMMAND_LINE.name, COMMAND_LINE.package) == ("megatron-run-cli", "megatron_run_cli")
    assert COMMAND_LINE.project["scripts"] == {"megatron-run": "megatron_run_cli.__main__:program"}
    assert read_project(ROOT)["name"] == "megatron-run"


@pytest.mark.parametrize("plugin", PLUGINS, ids=str)
def test_plugin_names_follow_from_the_folder(plugin: Member) -> None:
    kind, name = plugin.folder.parent.name, plugin.folder.name
    assert kind in KINDS
    assert plugin.name == f"megatron-run-{kind}-{name}"
    assert plugin.package == f"megatron_run_{kind}_{name}".replace("-", "_")
    found = plugin.project["entry-points"]
    # A second plugin of the kind that is made of the same tables lies in the package, in a module of its name.
    within = [known.name for known in KNOWN if (known.kind, known.within) == (kind, name)]
    modules = {each: f"{plugin.package}.{each}".replace("-", "_") for each in within}
    commands = {key: value for key, value in found.items() if key == entry_point_group(COMMAND)}
    assert found == {entry_point_group(kind): {name: plugin.package, **modules}, **commands}


@pytest.mark.parametrize("plugin", PLUGINS, ids=str)
def test_plugin_is_found_by_the_keywords_of_a_new_one(plugin: Member) -> None:
    keywords = ["megatron-run", "megatron-run-plugin", f"megatron-run-{plugin.folder.parent.name}"]
    assert plugin.project["keywords"] == keywords


@pytest.mark.parametrize("plugin", PLUGINS, ids=str)
def test_plugin_has_tests_where_its_name_says(plugin: Member) -> None:
    kind, name = plugin.folder.parent.name, plugin.folder.name
    expected = f"test_{kind}_{name}".replace("-", "_")
    folder = ROOT / "tests" / "plugins" / kind / name
    found = [file.name for file in folder.glob("test_*.py")]
    assert found
    assert all(file.startswith(expected) for file in found)


def test_built_in_names_follow_from_their_module() -> None:
    for member in (KERNEL, ENGINE):
        for kind in KINDS:
            folder = kind.replace("-", "_")
            for name, module in member.project["entry-points"].get(entry_point_group(kind), {}).items():
                assert module == f"{member.package}.builtin.{folder}.{name}"


def test_no_import_package_claims_a_foreign_name() -> None:
    top = {entry.name for member in MEMBERS for entry in member.source.iterdir() if entry.is_dir()}
    assert not FORBIDDEN & top
    assert all(name.startswith("megatron_run") for name in top - {"__pycache__"})


def test_all_distributions_share_one_version() -> None:
    import megatron_run
    import megatron_run_engine

    versions = {member.project["version"] for member in MEMBERS} | {read_project(ROOT)["version"]}
    assert versions == {megatron_run.__version__, megatron_run_engine.__version__}


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_members_ask_for_this_kernel(member: Member) -> None:
    if member is KERNEL:
        return
    version = KERNEL.project["version"]
    major, minor, _ = (int(part) for part in version.split("."))
    versions = f"=={version}" if member not in PLUGINS else f">={major}.{minor},<{major}.{minor + 1}"
    asked = [line for line in member.project["dependencies"] if line.startswith("megatron-run-")]
    assert f"{KERNEL.name}{versions}" in asked
    assert all(line.endswith(versions) for line in asked)


def test_folders_of_tests_are_no_packages() -> None:
    """They are imported by their path: two files may share a name."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
