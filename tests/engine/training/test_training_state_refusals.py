"""The docstring of ``training.state`` lists every refusal of a checkpoint, in the words that a user would paste."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megatron_run import errors
from megatron_run_engine.training import state
from tests.support.checkout import ENGINE, INFERENCE, KERNEL

#: What makes a refusal from the text that it is called with.
RAISERS = (
    *(name for name, each in vars(errors).items() if isinstance(each, type) and each.__module__ == errors.__name__),
    "saving",
)
#: Packages of which the table has every refusal.
PROMISED = ("checkpoint.", "training.state.")
#: Places that raise words which others have given them.
RELAYS = {
    *("checkpoint.collectives.on_rank0", "checkpoint.collectives.raise_first", "checkpoint.files.saving"),
    "training.state.memory_tier.MemoryTier._make_home",
}
#: Stands for what an f-string fills in: it is in no row.
HOLE = "\0"


class Site(NamedTuple):
    """A call that makes a refusal: its function or method, the text that begins the message, and its reason."""

    place: str
    text: str
    why: str = ""


class Row(NamedTuple):
    """A row of the table: words of a message, behind a colon those of its reason, and one place that raises it."""

    words: str
    place: str
    group: str = ""
    line: str = ""

    def lists(self, site: Site) -> bool:
        words, _, why = self.words.partition(": ")
        return words in site.text and why in site.why and f"{site.place}.".startswith(f"{self.place}.")


def literal(node: ast.expr | None, function: ast.AST) -> str:
    """The fixed words of ``node``; a name stands for what ``function`` assigns to it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part, function) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return HOLE
    if isinstance(node, ast.Name):
        assigned = (each for each in ast.walk(function) if isinstance(each, ast.Assign))
        values = (each.value for each in assigned if ast.unparse(each.targets[0]) == node.id)
        return HOLE.join(literal(value, function) for value in values)
    return ""


def sites(module: str, source: str) -> Iterator[Site]:
    """Every refusal that the ``source`` of ``module`` makes."""
    for top in ast.parse(source).body:
        inner = top.body if isinstance(top, ast.ClassDef) else [top]
        prefix = f"{module}.{top.name}" if isinstance(top, ast.ClassDef) else module
        for function in inner:
            place = f"{prefix}.{function.name}" if isinstance(function, ast.FunctionDef) else prefix
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RAISERS:
                    why = next((each.value for each in node.keywords if each.arg == "why"), None)
                    yield Site(place, literal(node.args[0] if node.args else None, function), literal(why, function))


def sources() -> dict[str, Path]:
    """The modules of engine and kernel by their names, which lack the import package; those of inference by theirs."""
    modules = {**KERNEL.modules, **ENGINE.modules}
    return {name.partition(".")[2]: file for name, file in modules.items()} | INFERENCE.modules


def rows() -> list[Row]:
    """The rows of the table, one for each place."""
    _, _, table, *_ = re.split(r"(?m)^=+  =+\n", state.__doc__ or "")
    found, group = list[Row](), ""
    for line in table.splitlines():
        if line.startswith("*"):
            group = line
            continue
        words, places = line[:41].strip(), re.findall("``(.+?)``", line)
        assert words, line
        assert places, line
        found += [Row(words, place, group, line) for place in places]
    return found


@cache
def all_sites() -> tuple[Site, ...]:
    """Every refusal of engine and kernel. Collecting the tests, in each worker, has no time for it."""
    read = ((module, file.read_text(encoding="utf-8")) for module, file in sources().items())
    return tuple(site for module, source in read for site in sites(module, source))


def test_every_refusal_is_listed() -> None:
    listed = [site for site in all_sites() if site.place.startswith(PROMISED) and site.place not in RELAYS]
    assert listed
    assert not [site for site in listed if not any(row.lists(site) for row in rows())]


def test_every_row_is_raised_where_it_says() -> None:
    assert rows()
    assert not [row for row in rows() if not any(row.lists(site) for site in all_sites())]


def test_a_row_names_the_function_that_raises_or_the_class_of_which_several_do() -> None:
    for row in rows():
        places = {site.place for site in all_sites() if row.lists(site)}
        assert places == {row.place} or (len(places) > 1 and "." in row.place), row
        assert places == {row.place} or {place.rpartition(".")[0] for place in places} == {row.place}, row
        assert places == {row.place} or row.place.rpartition(".")[2][0].isupper(), row


def test_rows_of_a_group_that_begin_alike_are_told_apart() -> None:
    for row in rows():
        assert not [
            each for each in rows() if each.group == row.group and each.words in row.words and each.line != row.line
        ]


def test_no_refusal_is_overlooked() -> None:
    files = (file for name, file in sources().items() if f"{name}.".startswith(PROMISED))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    calls = re.findall(rf"(?<!def )\b(?:{'|'.join(RAISERS)})\(", text)
    assert len(calls) == sum(site.place.startswith(PROMISED) for site in all_sites())
    assert {site.place for site in all_sites() if site.place.startswith(PROMISED) and not site.text} == RELAYS


def test_a_refusal_without_a_row_is_found() -> None:
    source = "class Reader:\n def find(self):\n  raise CheckpointError(f'{self.path} is {self.hue} all over', why='')"
    (site,) = sites("checkpoint.reader", source)
    assert site == Site("checkpoint.reader.Reader.find", f"{HOLE} is {HOLE} all over", "")
    assert not any(row.lists(site) for row in rows())
    assert Row("all over", "checkpoint.reader").lists(site)
    assert not Row("all over", "checkpoint.read").lists(site)
