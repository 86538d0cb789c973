"""Imports run down the floors of the house; plugins see public modules and nothing else."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from megatron_run.contracts.plugin import COMMAND, entry_point_group
from tests.architecture.house import House, circles, entry_of, floors, imported_by
from tests.architecture.picture import drawing
from tests.support.checkout import (
    COMMAND_LINE,
    ENGINE,
    KERNEL,
    MEMBERS,
    PLUGINS,
    ROOT,
    TESTING,
    UPON,
    Member,
    module_name,
)

HOUSE = House(ROOT)
EVERYWHERE = House(ROOT, plugins=True)
#: At most so many floors, the command above them all, and so many entries at the root of a distribution.
FLOORS, ENTRIES, ROOMS = 9, 12, {ENGINE: 15}
#: What plugins may import, and ``docs/plugin-authors.md`` lists: of the kernel these packages, with all in them,
OF_THE_KERNEL = frozenset(
    f"megatron_run.{name}" for name in ("config", "contracts", "errors", "files", "hookspecs", "pipeline")
)
#: and of the engine these packages and modules, whose public names are theirs alone, not those of a module in them.
OF_THE_ENGINE = frozenset(
    f"megatron_run_engine.{name}"
    for name in (
        *("builtin.model.gpt", "capture", "checkpoint", "data", "data.chat_template", "data.indexed_files"),
        *("data.user_files", "formats", "nn", "nn.parallel", "optim", "runtime"),
    )
)
#: The modules of the command line that commands of packages share.
SHARED = {
    "megatron_run_cli.completion.words",
    "megatron_run_cli.editor_schema",
    "megatron_run_cli.grammar",
    "megatron_run_cli.command_groups",
    "megatron_run_cli.output",
    "megatron_run_cli.progress",
    "megatron_run_cli.streams",
}
#: Plugins of a single file, which the pages show.
EXAMPLES = sorted((ROOT / "tests" / "examples" / "plugins").glob("*.py"))


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
    assert len(entries_of(member)) <= ROOMS.get(member, ENTRIES)


@pytest.mark.parametrize("member", [*UPON, COMMAND_LINE], ids=str)
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


@pytest.mark.parametrize("member", [KERNEL, ENGINE, *UPON], ids=str)
def test_a_distribution_imports_those_below_it(member: Member) -> None:
    """Of kernel and engine those that it asks pip for; the suites use the engine where it is installed."""
    asked = " ".join(member.project["dependencies"])
    below = {each.package for each in (KERNEL, ENGINE) if f"{each.name}==" in asked or member is TESTING}
    ours = {each.package for each in MEMBERS}
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
    rows = page.partition("| `megatron_run_cli.` | has |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert {f"{COMMAND_LINE.package}.{row.split('`')[1]}" for row in rows} == SHARED


def test_the_command_line_imports_no_plugin() -> None:
    """What it asks of a plugin goes through the plugin's contract."""
    plugins = {plugin.package for plugin in PLUGINS}
    for file in COMMAND_LINE.modules.values():
        assert not {name.partition(".")[0] for name in imported_by(file)} & plugins, file


def refused(name: str) -> bool:
    """Whether a plugin may not import ``name``, of the kernel or the engine."""
    holder, _, last = name.rpartition(".")
    if name.startswith(f"{ENGINE.package}."):
        return name not in OF_THE_ENGINE and (holder not in OF_THE_ENGINE or last not in offered(holder))
    return (holder != KERNEL.package and entry_of(name) not in OF_THE_KERNEL) or any(map(is_private, name.split(".")))


def offered(module: str) -> set[str]:
    """The public names of ``module``: those of its ``__all__``, or what it loads when it is asked, or defines."""
    found = importlib.import_module(module)
    return {name for name in getattr(found, "__all__", dir(found)) if not is_private(name)}


def is_private(word: str) -> bool:
    return word.startswith("_") and word != "__version__"


@pytest.mark.parametrize("file", [*EXAMPLES, *(file for each in PLUGINS for file in each.modules.values())], ids=str)
def test_plugins_import_public_names_only(file: Path) -> None:
    ours = tuple(f"{member.package}." for member in (KERNEL, ENGINE))
    assert not [name for name in imported_by(file) if name.startswith(ours) and refused(name)]


@pytest.mark.parametrize("plugin", PLUGINS, ids=str)
def test_plugins_do_not_import_each_other(plugin: Member) -> None:
    others = {
        COMMAND_LINE.package,
        *(each.package for each in UPON if each is not TESTING),
        *(other.package for other in PLUGINS),
    } - {plugin.package}
    for module, file in plugin.modules.items():
        closed = others - {COMMAND_LINE.package} if is_command(module) else others
        assert not {name.partition(".")[0] for name in imported_by(file)} & closed, file


@pytest.mark.parametrize(
    "name",
    [
        "megatron_run.registry.known.KNOWN",
        "megatron_run_engine.training.trainer.Trainer",
        "megatron_run_engine.data.documents.Document",
        "megatron_run_engine.data.documents",
        "megatron_run_engine.runtime.rng",
        "megatron_run_engine.nn.chunk",
    ],
)
def test_what_is_not_public_is_refused(name: str) -> None:
    assert refused(name)


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
    """Exactly that, and each of it is imported by a plugin of ours or for the options that planning reads."""
    page = " ".join((ROOT / "docs" / "plugin-authors.md").read_text(encoding="utf-8").split())
    sentence = page.partition("the modules that plugins are made from: ")[2].partition(" in tests.")[0]
    named = {word for index, word in enumerate(sentence.split("`")) if index % 2}
    assert named == {*OF_THE_KERNEL, *OF_THE_ENGINE, TESTING.package}
    used = {name for plugin in PLUGINS for file in plugin.modules.values() for name in imported_by(file)}
    assert {
        public for public in OF_THE_ENGINE | OF_THE_KERNEL if not any(x.startswith(f"{public}.") for x in used)
    } == set()
