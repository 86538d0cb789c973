"""Commands in messages are pasted into a shell: a path in one, which may have a space, is quoted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.support.checkout import MEMBERS, ROOT, Member

#: What begins a command, or an option with a path, as far as a semicolon.
BEGUN = re.compile(r"(?:\bmegatron-run (?!.*;)|--(?:set|plugin|base|device|compose|data) |pip install -e )[^;]*$")
#: Names that paths have here, and those of references to a plugin, which may be a file.
PATHS = {"base", "checked", "choice", "file", "folder", "home", "kept", "model", "out", "output", "path", "prefix"}
PATHS |= {"prompts", "reference", "references", "source", "target", "tokenizer", "trained", "where", "words", "written"}
#: Functions whose value is a path as it is.
PLAIN = {"str", "Path", "folder"}
#: ``choice`` of a new package's kind and name, which are checked to be words.
CHECKED = {"cli/src/megatron_run_cli/commands/new_package.py": {"choice"}}


def unquoted(tree: ast.AST) -> Iterator[str]:
    """Expressions in f-strings of ``tree`` that put a path into a command, and not by ``quote``."""
    nodes = [*ast.walk(tree)]
    for node in nodes:
        before = ""
        for part in node.values if isinstance(node, ast.JoinedStr) else ():
            if isinstance(part, ast.FormattedValue):
                paths = names(part.value) & PATHS if BEGUN.search(before) else set()
                if paths and paths - quoted(nodes):
                    yield ast.unparse(part.value)
                before += "_"
            elif isinstance(part, ast.Constant):
                before += str(part.value)


def quoted(nodes: Iterable[ast.AST]) -> set[str]:
    """The variables that ``nodes`` set to something quoted."""
    return {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("quote(")
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def names(node: ast.expr) -> set[str]:
    """The last names of what ``node`` shows: of ``a.path``, ``paths[0]``, ``str(path)`` and ``path or other``."""
    if isinstance(node, ast.BoolOp):
        return {name for each in node.values for name in names(each)}
    if isinstance(node, ast.Subscript):
        return names(node.value)
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        return {called, *(name for each in node.args for name in names(each))} if called in PLAIN else set()
    return {node.attr} if isinstance(node, ast.Attribute) else {node.id} if isinstance(node, ast.Name) else set()


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_a_path_in_a_command_is_quoted(member: Member) -> None:
    for file in member.modules.values():
        found = set(unquoted(ast.parse(file.read_text(encoding="utf-8"))))
        assert found == CHECKED.get(str(file.relative_to(ROOT)), set()), file


@pytest.mark.parametrize(
    "source",
    [
        "f'import it: megatron-run import {source} NEW'",
        "f'megatron-run import NEW --base {str(self.path)}'",
        "f'add --set run.init_from={checkpoints.folder(3)}'",
        "f'--plugin data={plugin.reference}'",
        "f'type: pip install -e {target}'",
        "f'megatron-run generate {prompts[0]}'",
        "f'--set data.tokenizer={kept or trained}'",
    ],
)
def test_an_unquoted_path_is_found(source: str) -> None:
    assert list(unquoted(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "f'{path} cannot be read'",
        "f'megatron-run: {path}'",
        "f'megatron-run import {quote(str(path))} NEW'",
        "path = quote(str(file))\nf'megatron-run import {path}'",
        "f'type megatron-run; then {path} is there'",
    ],
)
def test_what_is_no_command_or_quoted_is_none(source: str) -> None:
    assert not list(unquoted(ast.parse(source)))
