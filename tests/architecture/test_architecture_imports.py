"""Imports run down the floors of the house; plugins see public modules and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megatron_run
import megatron_run_engine
from megatron_run.contracts.plugin import COMMAND, entry_point_group
from tests.architecture.house import House, circles, entry_of, floors, imported_names
from tests.architecture.picture import drawing
from tests.support.checkout import (
    COMMAND_LINE,
    ENGINE,
    INFERENCE,
    KERNEL,
    MEMBERS,
    PLANNER,
    PLUGINS,
    ROOT,
    TESTING,
    Member,
    module_name,
)

HOUSE = House(ROOT)
EVERYWHERE = House(ROOT, plugins=True)
#: At most so many floors, the command above them all, and so many entries at the root of kernel and engine.
FLOORS, ENTRIES = 9, 12
#: Closed to plugins: what runs a training, and how the kernel finds and plans. Everything else may be imported.
CLOSED = {
    "megatron_run.planning",
    "megatron_run.registry",
    "megatron_run.builtin",
    "megatron_run_engine.builtin",
    "megatron_run_engine.launch",
    "megatron_run_engine.run_folder",
    "megatron_run_engine.training",
}
#: The modules of the command line that commands of packages share.
SHARED = {
    "megatron_run_cli.completion.words",
    "megatron_run_cli.editor_schema",
    "megatron_run_cli.grammar",
    "megatron_run_cli.groups",
    "megatron_run_cli.output",
    "megatron_run_cli.progress",
    "megatron_run_cli.streams",
}
#: Yet open: the built-in model, from which one that differs in a layer derives.
OPEN = "megatron_run_engine.builtin.model.gpt"


def imported_by(file: Path) -> set[str]:
    return set(imported_names(ast.parse(file.read_text(encoding="utf-8"))))


def entries_of(member: Member) -> list[str]:
    return sorted({entry_of(name) for name in HOUSE.files if name.startswith(f"{member.package}.")})


def is_command(module: str) -> bool:
    """Whether ``module`` holds commands that a package adds; the command line alone loads it."""
    parts = module.split(".")
    return parts[0] != COMMAND_LINE.package and parts[1:2] == ["commands"]


def test_the_floors_are_few_and_only_commands_are_above_them() -> None:
    """The command line, and above it the commands that packages add, on one floor."""
    levels = floors(HOUSE.entries)
    added = {levels.pop(name) for name in [*levels] if is_command(name)}
    top = levels.pop(COMMAND_LINE.package)
    assert max(levels.values()) <= FLOORS
    assert all(level < top for level in levels.values())
    assert added == {top + 1}


@pytest.mark.parametrize("member", [KERNEL, ENGINE], ids=str)
def test_a_root_has_few_entries(member: Member) -> None:
    assert len(entries_of(member)) <= ENTRIES


@pytest.mark.parametrize("member", [COMMAND_LINE, INFERENCE, PLANNER, TESTING], ids=str)
def test_a_root_that_counts_as_one_entry_has_few_modules(member: Member) -> None:
    """Its ``__init__`` aside, as everywhere."""
    inside = [name for name in HOUSE.files if name.startswith(f"{member.package}.") and not is_command(name)]
    below = {name.split(".")[1] for name in inside}
    assert 1 < len(below) <= ENTRIES, sorted(below)


def test_nothing_is_imported_in_a_circle() -> None:
    """Neither entries nor files, plugins included; an import for the type checker counts."""
    assert not circles(HOUSE.entries)
    assert not circles(EVERYWHERE.imports)


@pytest.mark.parametrize("name", [name for member in (KERNEL, ENGINE) for name in entries_of(member)])
def test_a_package_says_what_it_imports(name: str) -> None:
    file = HOUSE.files[name]
    if file.name != "__init__.py":
        pytest.skip("a module: its imports stand below its docstring")
    said = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").rpartition("Imports: ")[2]
    found = sorted(each.rpartition(".")[2] for each in HOUSE.entries[name])
    assert said.rstrip(".").replace("\n", " ").split(", ") == (found or ["nothing"])


@pytest.mark.parametrize(
    ("member", "below"),
    [
        (KERNEL, set()),
        (ENGINE, {KERNEL.package}),
        (INFERENCE, {KERNEL.package, ENGINE.package}),
        (PLANNER, {KERNEL.package}),
        (TESTING, {KERNEL.package, ENGINE.package}),
    ],
    ids=["kernel", "engine", "inference", "planner", "testing"],
)
def test_a_distribution_imports_those_below_it(member: Member, below: set[str]) -> None:
    ours = {each.package for each in (KERNEL, ENGINE, INFERENCE, PLANNER, TESTING, COMMAND_LINE, *PLUGINS)}
    for module, file in member.modules.items():
        found = {name.partition(".")[0] for name in imported_by(file)} & ours
        above = {COMMAND_LINE.package, ENGINE.package} if is_command(module) else set()  # a plan may ask the engine
        assert found <= {member.package, *below, *above}, file


@pytest.mark.parametrize("member", [member for member in MEMBERS if member is not COMMAND_LINE], ids=str)
def test_commands_of_packages_share_a_few_modules_of_the_command_line(member: Member) -> None:
    """Nothing else of a package imports them or the command line, which loads them by their entry points alone."""
    points = member.project.get("entry-points", {}).get(entry_point_group(COMMAND), {})
    assert set(points.values()) <= {f"{member.package}.commands"}
    for module, file in member.modules.items():
        imported = imported_by(file)
        shared = {name for name in imported if name.partition(".")[0] == COMMAND_LINE.package}
        if is_command(module):
            assert all(name in SHARED or name.rpartition(".")[0] in SHARED for name in shared), (file, shared)
        else:
            assert not shared, file
            assert not any(map(is_command, imported)), file


def test_the_page_about_commands_names_what_they_share() -> None:
    page = (ROOT / "docs" / "your-own-command.md").read_text(encoding="utf-8")
    rows = page.partition("| `megatron_run_cli.` | has |\n|---|---|\n")[2].splitlines()
    assert {f"{COMMAND_LINE.package}.{row.split('`')[1]}" for row in rows if row} == SHARED


def test_the_command_line_imports_no_plugin() -> None:
    """What it asks of a plugin goes through the plugin's contract."""
    plugins = {plugin.package for plugin in PLUGINS}
    for file in COMMAND_LINE.modules.values():
        assert not {name.partition(".")[0] for name in imported_by(file)} & plugins, file


@pytest.mark.parametrize("plugin", PLUGINS, ids=str)
def test_plugins_import_public_names_only(plugin: Member) -> None:
    others = {COMMAND_LINE.package, INFERENCE.package, *(other.package for other in PLUGINS)} - {plugin.package}
    for module, file in plugin.modules.items():
        closed = others - {COMMAND_LINE.package} if is_command(module) else others
        for name in imported_by(file):
            top, *rest = name.split(".")
            assert top not in closed, f"{file} imports {name}"
            if top in (KERNEL.package, ENGINE.package):
                assert entry_of(name) not in CLOSED or name.rpartition(".")[0] == OPEN, f"{file} imports {name}"
                assert not any(word.startswith("_") and word != "__version__" for word in rest), (
                    f"{file} imports {name}"
                )


@pytest.mark.parametrize("plugin", PLUGINS, ids=str)
def test_a_plugin_depends_on_what_it_imports(plugin: Member) -> None:
    tops = {name.partition(".")[0] for file in plugin.modules.values() for name in imported_by(file)}
    tops |= {ENGINE.package} if "torch" in tops else set()  # torch, in the right version, comes with the engine
    needed = {member.name for member in (KERNEL, ENGINE, TESTING) if member.package in tops}
    extras = plugin.project.get("optional-dependencies", {}).values()
    lines = [*plugin.project["dependencies"], *(line for extra in extras for line in extra)]
    asked = {line.split(">")[0] for line in lines if line.startswith("megatron-run-")}
    assert asked == needed | {KERNEL.name}


def test_module_names_are_read_from_paths() -> None:
    assert module_name(Path("megatron_run/config/__init__.py")) == "megatron_run.config"
    assert module_name(Path("megatron_run/config/yaml.py")) == "megatron_run.config.yaml"


def small_house(folder: Path, files: dict[str, str]) -> House:
    for name, text in files.items():
        file = folder / "core" / "kernel" / "src" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return House(folder)


@pytest.mark.parametrize(
    "text",
    [
        "from megatron_run.b.y import f",
        "def g():\n    from megatron_run.b import y",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import megatron_run.b.y",
    ],
)
def test_a_circle_is_seen_however_it_is_closed(tmp_path: Path, text: str) -> None:
    files = {"megatron_run/a/x.py": text, "megatron_run/b/y.py": "from megatron_run.a.x import f"}
    house = small_house(tmp_path, files)
    assert circles(house.entries) == [["megatron_run.a", "megatron_run.b"]]
    assert circles(house.imports) == [["megatron_run.a.x", "megatron_run.b.y"]]


def test_floors_count_from_the_ground(tmp_path: Path) -> None:
    files = {"megatron_run/a.py": "", "megatron_run/b.py": "import megatron_run.a", "megatron_run/c.py": "import os"}
    assert floors(small_house(tmp_path, files).entries) == {
        "megatron_run.a": 1,
        "megatron_run.b": 2,
        "megatron_run.c": 1,
    }


def test_the_picture_of_the_house_is_todays() -> None:
    file = ROOT / "docs" / "images" / "house.svg"
    assert file.read_text(encoding="utf-8") == drawing(HOUSE), "make docs draws it again"


def test_the_page_for_authors_names_what_plugins_may_import() -> None:
    """All of it may be imported, and all that our own plugins import is named."""
    page = " ".join((ROOT / "docs" / "plugin-authors.md").read_text(encoding="utf-8").split())
    sentence = page.partition("the modules that plugins are made from: ")[2].partition(" in tests.")[0]
    named = {word for index, word in enumerate(sentence.split("`")) if index % 2}
    used = {
        OPEN if name.rpartition(".")[0] == OPEN else entry_of(name)
        for plugin in PLUGINS
        for file in plugin.modules.values()
        for name in imported_by(file)
        if name.partition(".")[0] in (KERNEL.package, ENGINE.package)
    }
    public = {
        f"{package.__name__}.{name}" for package in (megatron_run, megatron_run_engine) for name in package.__all__
    }
    assert not named & CLOSED
    assert used - public <= named
