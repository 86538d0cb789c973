"""The site for programs that read: each page as Markdown beside its HTML, a list of them, and one file of all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from urllib.parse import urljoin

from docs.site.pages import Page, source_of

#: What the one file leaves out, for its size.
_APART = "api/"
_DIRECTIVE = re.compile(r"^::: (?P<name>\S+)\n(?: {4}.*\n)*", re.MULTILINE)
_GENERATED = re.compile(r"^<!-- \[\[\[.*?-->\n+", re.MULTILINE)
_ENTRY = re.compile(r"(?:-|\d\.) (?=\[)")
_LINK = re.compile(r"\]\((?!\w+:)(?P<path>[^)]+)\)")
_HEAD = """# {title}

> {summary}

All pages but the API's are one file: [llms-full.txt](llms-full.txt).
"""
#: Pages that are made from the sources, which the table of contents does not have.
_REFERENCE = """
## Reference

- [Kinds](kinds/index.md): the hook and the contract of each kind of plugin
- [Plugins](plugins.md): every plugin, with its options; as data in [plugins.json](plugins.json)
- [API](api/index.md): what a plugin or a program may import
- [Measured](results/index.md): benchmarks and what they found
"""


def plain(markdown: str) -> str:
    """``markdown`` of a page as it is read alone: what the API's directives stand for, and no marks of generators."""
    return _DIRECTIVE.sub(lambda match: _declared(match["name"]), _GENERATED.sub("", markdown))


def listed(contents: str, title: str, summary: str, address: str) -> str:
    """llms.txt (llmstxt.org): the entries of ``contents``, the table of contents, with links below ``address``."""
    text = _HEAD.format(title=title, summary=summary) + "".join(_entries(contents)) + _REFERENCE
    return _LINK.sub(lambda match: f"]({urljoin(address, match['path'])})", text)


def _entries(contents: str) -> Iterator[str]:
    for line in contents.splitlines():
        if line.startswith("## "):
            yield f"\n{line}\n\n"
        elif (mark := _ENTRY.match(line)) is not None:
            yield f"- {line[mark.end() :]}\n"


def joined(pages: Iterable[Page]) -> str:
    """llms-full.txt: ``pages`` one after the other, each below the path by which the others link to it."""
    together = (page for page in pages if not page[0].startswith(_APART))
    return "\n".join(f"<!-- page: {path} -->\n\n{text.strip()}\n" for path, text in together)


@cache
def _declared(name: str) -> str:
    """A block of code with the public declarations of the module ``name``, or of the function ``name`` in one."""
    file = source_of(name)
    module, _, function = ("", "", "") if file else name.rpartition(".")
    file = file or source_of(module)
    if file is None:
        raise LookupError(name)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if function:
        tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    code = ast.unparse(_Declarations().visit(tree))
    return f"`{name}`:\n\n```python\n{code}\n```\n"


class _Declarations(ast.NodeTransformer):
    """Leaves of a module what others see: no private names, of functions the docstring alone."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef | None:
        if node.name.startswith("_") and node.name != "__init__":
            return None
        documented = ast.get_docstring(node, clean=False) is not None
        node.body = node.body[:1] if documented else [ast.Expr(ast.Constant(...))]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST | None:
        return None if node.name.startswith("_") else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        return None if all(isinstance(to, ast.Name) and to.id.startswith("_") for to in node.targets) else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign | None:
        return None if isinstance(node.target, ast.Name) and node.target.id.startswith("_") else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        return None if node.module == "__future__" else node
