"""An import runs down the kernel's order, never up; plugins see the kernel's public names and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import megatron_run
from tests.support.checkout import COMMAND_LINE, KERNEL, PLUGINS, ROOT, Member, module_name

#: The kernel from the ground up; a part may import its own line and the lines above it in this table.
ORDER = (
    ("__version__", "errors"),
    ("contracts", "actions", "topology", "world", "phases", "faults"),
    ("hookspecs",),
    ("config", "comm", "gloo"),
    ("registry",),
    ("pipeline", "gradients", "rng", "metrics", "segments", "parameters", "learning_rate", "batch_size", "observing"),
    ("nn", "data", "optim", "checkpoint", "graphs"),
    ("builtin",),
    ("resolve",),
    ("run_folder", "training", "interchange"),
    ("trainer",),
    ("launch",),
    ("testing",),
)
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}
#: What a plugin may import: the kernel below its built-ins, the package's public names, and the conformance suites.
OPEN_TO_PLUGINS = {part for part, level in LEVEL.items() if level < LEVEL["builtin"]} - {"registry"}
OPEN_TO_PLUGINS |= {*megatron_run.__all__, "testing"}


def is_type_checking(node: ast.AST) -> bool:
    """Whether ``node`` is ``if TYPE_CHECKING:``."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module name that ``tree`` imports when it runs, wherever the statement stands."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node)


def imported_by(file: Path) -> set[str]:
    return set(imports(ast.parse(file.read_text(encoding="utf-8"))))


def part_of(module: str) -> str:
    """``megatron_run.pipeline.plan.Plan`` -> ``pipeline``; empty for the package itself."""
    return [*module.split("."), ""][1]


def kernel_modules() -> dict[str, Path]:
    return {name: file for name, file in KERNEL.modules.items() if name != "megatron_run"}


def faults(module: str, names: set[str]) -> list[str]:
    """The imports among ``names`` that run up the order from ``module``."""
    here = LEVEL[part_of(module)]
    ours = sorted(name for name in names if name.split(".")[0] == "megatron_run")
    return [f"{module} imports {name}" for name in ours if LEVEL.get(part_of(name), len(ORDER)) > here]


def test_every_part_of_the_kernel_has_its_place() -> None:
    assert {part_of(name) for name in kernel_modules()} <= set(LEVEL), "add the new part to ORDER where it belongs"


def test_imports_run_down() -> None:
    found = [fault for name, file in kernel_modules().items() for fault in faults(name, imported_by(file))]
    assert not found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "from megatron_run_engine.training.trainer import Trainer",
            ["megatron_run.nn.x imports megatron_run.trainer.Trainer"],
        ),
        (
            "def f():\n    import megatron_run_engine.launch",
            ["megatron_run_engine.nn.x imports megatron_run_engine.launch"],
        ),
        ("from megatron_run_engine import train", ["megatron_run.nn.x imports megatron_run.train"]),
        ("if TYPE_CHECKING:\n    from megatron_run_engine.training.trainer import Trainer", []),
        ("from megatron_run.contracts import Model\nimport torch", []),
    ],
)
def test_an_upward_import_is_found(source: str, expected: list[str]) -> None:
    assert faults("megatron_run_engine.nn.x", set(imports(ast.parse(source)))) == expected


def test_kernel_modules_import_in_no_circle() -> None:
    modules = KERNEL.modules
    graph = {}
    for name, file in modules.items():
        wanted = {found for found in imported_by(file) if found.startswith("megatron_run.")}
        graph[name] = {found if found in modules else found.rpartition(".")[0] for found in wanted} - {name}
    TopologicalSorter(graph).prepare()


def test_the_kernel_knows_neither_the_command_line_nor_a_plugin() -> None:
    outsiders = {COMMAND_LINE.package, *(plugin.package for plugin in PLUGINS)}
    for file in KERNEL.modules.values():
        assert not outsiders & {name.split(".")[0] for name in imported_by(file)}, file


@pytest.mark.parametrize("plugin", PLUGINS, ids=str)
def test_plugins_import_public_kernel_names_only(plugin: Member) -> None:
    others = {COMMAND_LINE.package, *(other.package for other in PLUGINS)} - {plugin.package}
    for file in plugin.modules.values():
        for name in imported_by(file):
            top, *rest = name.split(".")
            assert top not in others, f"{file} imports {name}"
            if top == "megatron_run":
                assert part_of(name) in OPEN_TO_PLUGINS, f"{file} imports {name}"
                assert not any(word.startswith("_") and word != "__version__" for word in rest), (
                    f"{file} imports {name}"
                )


def test_module_names_are_read_from_paths() -> None:
    assert module_name(Path("megatron_run/nn/__init__.py")) == "megatron_run_engine.nn"
    assert module_name(Path("megatron_run/nn/block.py")) == "megatron_run_engine.nn.block"


def test_the_design_page_draws_this_order() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    drawn = page.partition("## Who may import whom")[2].split("```")[1].split("\n")
    lines = [tuple(line.split()) for line in drawn if line.strip()]
    assert [set(line) for line in reversed(lines)] == [set(parts) - {"__version__"} for parts in ORDER]


def test_the_page_for_authors_names_what_plugins_may_import() -> None:
    """All of it may be imported, and all that our own plugins import is named."""
    page = (ROOT / "docs" / "plugin-authors.md").read_text(encoding="utf-8")
    sentence = page.partition("the modules that plugins are made from: ")[2].partition(" in tests.")[0]
    named = {word for index, word in enumerate(sentence.split("`")) if index % 2}
    used = {
        part_of(name)
        for plugin in PLUGINS
        for file in plugin.modules.values()
        for name in imported_by(file)
        if name.split(".")[0] == "megatron_run"
    }
    assert named <= OPEN_TO_PLUGINS
    assert used - {*megatron_run.__all__} <= named
