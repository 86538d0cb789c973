"""Measures the house: lines, files, root entries, floors and circles, for this checkout or another one.

``python -m tests.architecture.house [CHECKOUT]`` prints the figures. An *entry* is a module or package directly below
an import root. An entry stands one floor above the highest entry that it imports; imports inside functions and for the
type checker count. A *circle* is a set of files that import each other, directly or through others.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tests.support.checkout import COMMAND_LINE, UPON, module_name

#: Import roots that count as one entry.
WHOLE = tuple(each.package for each in (*UPON, COMMAND_LINE))
Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class House:
    """The sources of one checkout: every ``src`` folder below ``core`` and ``cli``, and with ``plugins`` theirs."""

    root: Path
    plugins: bool = False

    @cached_property
    def files(self) -> dict[str, Path]:
        """Dotted module name -> file."""
        patterns = ["core/src", "core/*/src", "cli/src", *(["plugins/*/*/src"] if self.plugins else [])]
        sources = [source for pattern in patterns for source in sorted(self.root.glob(pattern))]
        return {
            module_name(file.relative_to(source)): file for source in sources for file in sorted(source.rglob("*.py"))
        }

    @cached_property
    def imports(self) -> Graph:
        """File -> the files that it imports, both as module names."""
        return {name: frozenset(self._imported(name, file)) for name, file in self.files.items()}

    def _imported(self, importer: str, file: Path) -> Iterator[str]:
        for name in imported_by(file):
            found = name if name in self.files else name.rpartition(".")[0]
            if found in self.files and found != importer:
                yield found

    @cached_property
    def entries(self) -> Graph:
        """Entry -> the entries that it imports. An import root's own ``__init__`` loads by name, and is no entry."""
        graph: defaultdict[str, set[str]] = defaultdict(set)
        for name, imported in self.imports.items():
            if (here := entry_of(name)) in WHOLE or "." in here:
                graph[here] |= {there for each in imported if "." in (there := entry_of(each)) or there in WHOLE} - {
                    here
                }
        return {name: frozenset(each) for name, each in graph.items()}

    def lines(self, within: str) -> int:
        """Lines of the files of ``within``, an entry or an import root."""
        return sum(
            len(file.read_text(encoding="utf-8").splitlines())
            for name, file in self.files.items()
            if name == within or name.startswith(within + ".")
        )


def entry_of(module: str) -> str:
    """``megatron_run.pipeline.plan`` -> ``megatron_run.pipeline``; the suites and the command are one entry each.

    The commands that a package adds are an entry of their own: they stand above the command.
    """
    parts = module.split(".")
    whole = parts[0] in WHOLE and (parts[0] == "megatron_run_cli" or parts[1:2] != ["commands"])
    return parts[0] if whole else ".".join(parts[:2])


def _is_entry(name: str) -> bool:
    return "." in name or name in WHOLE


@cache
def imported_by(file: Path) -> frozenset[str]:
    """As :func:`imported_names` of the source ``file``, which is read once."""
    return frozenset(imported_names(ast.parse(file.read_text(encoding="utf-8"))))


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every name that ``tree`` imports, wherever the statement stands and whoever it is for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floors(graph: Graph) -> dict[str, int]:
    """The floor of each entry of a graph without circles, counted from 1."""
    found: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in found:
            found[name] = 1 + max((floor(each) for each in graph[name]), default=0)
        return found[name]

    for name in graph:
        floor(name)
    return found


def circles(graph: Graph) -> list[list[str]]:
    """The sets of names that reach each other (strongly connected components of two or more), each sorted."""
    reach = {name: _reachable(graph, name) for name in graph}
    found = {frozenset({name, *(each for each in reach[name] if name in reach[each])}) for name in graph}
    return sorted(sorted(each) for each in found if len(each) > 1)


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def shared_names(files: Iterable[Path]) -> Counter[str]:
    """File names that occur more than once, ``__init__`` and ``__main__`` aside."""
    counts = Counter(file.stem for file in files)
    return Counter({name: count for name, count in counts.items() if count > 1 and not name.startswith("__")})


def asked_by_plugins(everywhere: House, core: set[str], top: str) -> set[str]:
    """The names of the import root ``top`` that plugins import, each with its module."""
    files = (file for name, file in everywhere.files.items() if name.partition(".")[0] not in core)
    imported = (name for file in files for name in imported_by(file))
    return {name for name in imported if name.startswith(f"{top}.")}


def report(root: Path) -> str:
    """The figures of the checkout at ``root``, as a table and a few lines."""
    house = House(root)
    everywhere = House(root, plugins=True)
    tops = sorted({name.partition(".")[0] for name in house.files})
    rows = [f"{'import':24} {'lines':>7} {'files':>6} {'entries':>8}"]
    for top in tops:
        files = [name for name in house.files if name.partition(".")[0] == top]
        entries = [name for name in house.entries if name.partition(".")[0] == top]
        rows.append(f"{top:24} {house.lines(top):7,} {len(files):6} {len(entries):8}")
    count = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in everywhere.files.values())
    rows.append(f"{'with the plugins':24} {count:7,} {len(everywhere.files):6}")
    tied = circles(house.entries)
    if tied:
        rows += [f"entries in a circle: {', '.join(names)}" for names in tied]
    else:
        levels = floors(house.entries)
        for level in range(max(levels.values()), 0, -1):
            rows.append(f"floor {level}: {' '.join(sorted(name for name, at in levels.items() if at == level))}")
    file_circles = circles(everywhere.imports)
    rows.append(f"circles among files: {len(file_circles)}")
    rows += [f"  {' '.join(names)}" for names in file_circles]
    core = {name.partition(".")[0] for name in house.files}
    for top in sorted(core):
        names = asked_by_plugins(everywhere, core, top)
        modules = {name.rpartition(".")[0] for name in names}
        if names:
            rows.append(f"plugins import of {top}: {len(names)} names in {len(modules)} modules")
    twice = shared_names(everywhere.files.values())
    rows.append(f"file names used more than once: {len(twice)}: {' '.join(sorted(twice))}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(report(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()))
