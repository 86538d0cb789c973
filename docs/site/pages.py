"""The pages of the site that are made from the sources: kinds, plugins, API."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from docs.site.catalogue import by_others
from docs.site.catalogue import rows as listed_by_others
from docs.site.docstrings import as_markdown
from megatron_run.contracts import KINDS, PluginInfo, entry_point_group
from megatron_run.contracts.plugin import COMMAND
from megatron_run.registry.known import COMMAND_SUMMARIES, KNOWN_COMMANDS
from megatron_run_cli.reports.keys import model_keys

ROOT = Path(__file__).parents[2]

Page = tuple[str, str]
"""Path of a page in the site, and its Markdown."""


def made_pages() -> Iterator[Page]:
    """Every page that is made, with the path by which navigation and links find it."""
    yield "kinds/index.md", _kinds()
    for kind in KINDS:
        yield f"kinds/{kind}.md", _kind(kind)
    yield "plugins.md", _plugins()
    yield "api/index.md", _api_index()
    for library in libraries():
        for module in entries(library):
            yield f"api/{module}.md", _api(module)


@cache
def libraries() -> tuple[Path, ...]:
    """The folders of the packages that others import: those of core/."""
    found = (*ROOT.glob("core/src/*/__init__.py"), *ROOT.glob("core/*/src/*/__init__.py"))
    return tuple(sorted(file.parent for file in found))


def entries(library: Path) -> list[str]:
    """The package itself, and the dotted name of each public module or package at its root."""
    names = (file.stem for file in library.iterdir() if file.suffix == ".py" or (file / "__init__.py").is_file())
    return [library.name, *(f"{library.name}.{name}" for name in sorted(names) if not name.startswith("_"))]


def submodules(module: str) -> Iterator[str]:
    """The public modules and packages inside the package ``module``, at any depth; of a library's root none."""
    folder = next(library.parent for library in libraries() if module.split(".", maxsplit=1)[0] == library.name)
    for file in sorted((folder / module.replace(".", "/")).rglob("*.py") if "." in module else ()):
        parts = file.relative_to(folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if (name := ".".join(parts)) != module and not any(part.startswith("_") for part in parts):
            yield name


def source_of(module: str) -> Path | None:
    """The file of the module or package ``module`` of ours; None when there is none."""
    for library in libraries():
        path = library.parent.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    return None


def summary(module: str) -> str:
    """The first line of a module's docstring, read without importing it."""
    if (file := source_of(module)) is None:
        raise LookupError(module)
    found = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return as_markdown(found.partition("\n")[0])


def _kinds() -> str:
    rows = (
        (f"[{kind}]({kind}.md)", _about(kind), ", ".join(each.link for each in plugins() if each.info.kind == kind))
        for kind in KINDS
    )
    return f"""# Kinds of plugins

A plugin is of one kind: its hook is called once, and makes an object that keeps the contract of the kind. Each page
shows the hook and the contract as they stand in the sources, and the plugins that are there.
[Writing a plugin](../plugin-authors.md) has the rules and an example of every kind.

{_table(("kind", "what it is", "plugins"), rows)}"""


def _kind(kind: str) -> str:
    word = kind.replace("-", "_")
    rows = ((each.link, each.summary, f"`{each.distribution}`") for each in plugins() if each.info.kind == kind)
    return f"""# {kind}

{_about(kind)}

{_table(("plugin", "what it does", "distribution"), rows)}
Start one of your own, and check it:

```
megatron-run plugins new {kind} mine
megatron-run plugins check megatron-run-{kind}-mine
```

## The hook

Entry-point group `{entry_point_group(kind)}`.

::: megatron_run.hookspecs.megatron_run_create_{word}
    options:
      heading_level: 3

## The contract

::: megatron_run.contracts.{word}
    options:
      show_root_heading: false
      show_root_toc_entry: false
      show_root_members_full_path: false
      heading_level: 3
      show_docstring_description: true
"""


def _about(kind: str) -> str:
    """The decisions of a kind: the docstring of its contract, which begins with the kind's name."""
    text = summary(f"megatron_run.contracts.{kind.replace('-', '_')}").partition(": ")[2]
    return text[:1].upper() + text[1:]


def _plugins() -> str:
    parts = ["# Plugins\n\nFrom the metadata of each; `megatron-run plugins info KIND=NAME` says the same."]
    parts.append(" Those [by others](#by-others) stand below. [plugins.json](plugins.json) has all of them as data.\n")
    for kind in KINDS:
        parts += [f"\n## {kind}\n\n{_about(kind)} See [its contract](kinds/{kind}.md).\n"]
        parts += [_plugin(each) for each in plugins() if each.info.kind == kind]
    return "".join(parts) + _by_others()


def _by_others() -> str:
    """The part of the page that others fill."""
    text = "\n## By others\n\nOne line in `plugins/by-others.csv` adds [yours](plugin-authors.md#publish-it)."
    text += " Others carry the keyword `megatron-run-plugin` on the package index.\n\n"
    rows = list(listed_by_others())
    return text + (_table(("kind", "plugin", "distribution", "what it does"), rows) if rows else "")


def catalogue() -> str:
    """What ``megatron-run plugins search`` reads: every plugin and command, as JSON."""
    ours = [
        {
            "kind": each.info.kind,
            "name": each.info.name,
            "distribution": each.distribution,
            "summary": each.summary.replace("``", "").replace("`", ""),
        }
        for each in plugins()
    ]
    ours += [
        {"kind": COMMAND, "name": name, "distribution": KNOWN_COMMANDS[name], "summary": summary}
        for name, summary in COMMAND_SUMMARIES.items()
    ]
    others = [{**asdict(each), "by_others": True} for each in by_others()]
    return json.dumps({"v": 1, "plugins": [*ours, *others]}, indent=1) + "\n"


def _plugin(plugin: Plugin) -> str:
    info = plugin.info
    wishes = {word: sorted(getattr(info, word)) for word in ("provides", "requires", "conflicts")}
    wishes["suggests"] = [f"{key}={value}" for key, value in info.suggests.items()]
    text = f"\n### {plugin}\n\n{plugin.summary} From `{plugin.distribution}`.\n"
    for word, told in wishes.items():
        text += f"\n{word.capitalize()}: {', '.join(f'`{each}`' for each in told)}.\n" if told else ""
    if info.options is None:
        return text
    rows = (
        (f"`{key.name}`", key.kind, key.default_text, key.description)
        for key in model_keys(info.options, (info.kind.replace("-", "_"),))
    )
    return f"{text}\n{_table(('option', 'type', 'default', 'meaning'), rows)}"


@dataclass(frozen=True)
class Plugin:
    """An installed plugin of this repository: what it says of itself, and the first line of its docstring."""

    info: PluginInfo
    distribution: str
    summary: str

    def __str__(self) -> str:
        return f"{self.info.kind}={self.info.name}"

    @property
    def link(self) -> str:
        """Its name, and where the page of plugins shows it, as seen from the page of a kind."""
        return f"[{self.info.name}](../plugins.md#{self.info.kind}{self.info.name})"


@cache
def plugins() -> tuple[Plugin, ...]:
    """Every plugin of this repository, by kind, the built-in ones first."""
    projects = tuple(ROOT.glob("core/*/pyproject.toml"))
    own = {_distribution(file): 0 for file in projects}
    own |= {_distribution(file): 1 for file in ROOT.glob("plugins/*/*/pyproject.toml")}
    found = []
    for kind in KINDS:
        points = ((each.dist.name, each) for each in entry_points(group=entry_point_group(kind)) if each.dist)
        ours = (each for each in points if each[0] in own)
        for distribution, point in sorted(ours, key=lambda each: (own[each[0]], each[1].name)):
            module = point.load()
            found.append(Plugin(module.megatron_run_plugin_info(), distribution, _said(module.__doc__)))
    return tuple(found)


def _distribution(pyproject: Path) -> str:
    return str(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["name"])


def _said(docstring: str) -> str:
    """The first line, without the ``kind=name: `` that it begins with."""
    line = re.sub(r"^(?:\S+=\S+|[\w ]+ ``\S+``): ", "", docstring.partition("\n")[0])
    return line[:1].upper() + line[1:]


def _api(module: str) -> str:
    """A module, or a package with its modules. Contracts and factories stand on the pages of their kinds."""
    own = {f"megatron_run.contracts.{kind.replace('-', '_')}" for kind in KINDS}
    text = f"# {module}\n\n::: {module}\n    options:\n      show_root_heading: false\n"
    if module.endswith(".hookspecs"):
        text += "      filters: ['!^_', '!^megatron_run_create_']\n"
        text += "\nThe factories are on the [pages of their kinds](../kinds/index.md).\n"
    return text + "".join(f"\n::: {each}\n" for each in submodules(module) if each not in own)


def _api_index() -> str:
    parts = ["# API reference\n\nThe packages that a plugin or a program may import, from their docstrings.\n"]
    for library in libraries():
        rows = ((f"[{module}]({module}.md)", summary(module)) for module in entries(library))
        parts.append(f"\n## {library.name}\n\n{_table(('module', 'what it holds'), rows)}")
    return "".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines) + "\n"
