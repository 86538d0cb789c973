"""A new package with a plugin or command: small, complete, working from its first minute; templates hold its files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from megatron_run import __version__
from megatron_run.contracts.plugin import COMMAND, KINDS, RUN_KINDS, check_kind, entry_point_group
from megatron_run.errors import InputError, taken
from megatron_run.files.publishing import publishing_folder
from megatron_run.registry.discover import KERNEL, Catalog, scan

#: What packages offer.
OFFERED = (*KINDS, COMMAND)
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Package:
    """A package that was written: its folder, its files relative to it, and how its plugin is chosen.

    ``command`` is what to type to use the plugin once the package is installed, with the arguments of its template.
    """

    folder: Path
    files: tuple[str, ...]
    distribution: str
    choice: str
    command: str


def write_package(kind: str, name: str, folder: Path | None = None, catalog: Catalog | None = None) -> Package:
    """Write a package with a working plugin ``kind=name`` into ``folder`` (default: named like the distribution).

    Raises :class:`InputError` when the name cannot be a package's or is taken, or the folder exists.
    """
    kind = check_kind(kind, "", OFFERED)
    _check_name(kind, name, scan() if catalog is None else catalog)
    distribution = f"megatron-run-{kind}-{name.replace('.', '-')}"
    folder = Path(distribution) if folder is None else folder
    choice = f"{kind}={'dense+' if kind == 'parallel-layer' else ''}{name}"  # that template stands on another's layers
    use = f"--plugin {choice}" if kind in RUN_KINDS else f"import SOURCE FOLDER --from {name}"
    typed = name.replace(".", " ")
    use = f"{typed} runs" if kind == COMMAND else use  # the template lists a folder of runs
    words = {
        "kind": kind,
        "name": name,
        "typed": typed,
        "key": f'"{name}"' if "." in name else name,
        "command": f"megatron-run {use}",
        "distribution": distribution,
        "package": distribution.replace("-", "_"),
        "group": entry_point_group(kind),
        "kernel": _compatible(__version__),
        "requirements": ", ".join(f'"{name}{_compatible(__version__)}"' for name in _requirements(kind)),
    }
    written = _write(folder, {path: _fill(template, words) for path, template in _plan(kind, words)})
    return Package(folder, written, distribution, choice, words["command"])


def _requirements(kind: str) -> tuple[str, ...]:
    """The distributions that the template of ``kind`` imports: those of pure data need no engine, and so no torch."""
    if kind == COMMAND:
        return (KERNEL, "megatron-run-cli")
    return (KERNEL,) if kind in ("schedule", "observer") else (KERNEL, "megatron-run-engine")


def _check_name(kind: str, name: str, catalog: Catalog) -> None:
    parts, what = (name.split("."), "command") if kind == COMMAND else ([name], "plugin")
    if not all(map(_NAME.fullmatch, parts)):
        better = ".".join(filter(None, (re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts)))
        raise InputError(
            f"{name!r} cannot name a {what}",
            why="a name is lower-case letters and digits, joined by single hyphens",
            fix=f"write {better}" if better else "write a name such as zigzag",
        )
    offered = catalog.offering(kind, name)
    if offered:
        raise InputError(f"{kind}={name} is taken by {offered[0].source}", fix="choose another name")


def _plan(kind: str, words: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The files of the package and the template of each."""
    return (
        ("pyproject.toml", "pyproject.toml.in"),
        ("README.md", "README.md.in"),
        ("LICENSE", "LICENSE.in"),
        (".github/workflows/test.yml", "workflow-test.yml.in"),
        (".github/workflows/publish.yml", "workflow-publish.yml.in"),
        (f"src/{words['package']}/__init__.py", f"{kind}.py.in"),
        (f"tests/test_{words['package']}.py", "test.py.in"),
    )


def _fill(template: str, words: dict[str, str]) -> str:
    text = (files("megatron_run_cli") / "templates" / template).read_text(encoding="utf-8")
    return Template(text).substitute(words)


def _write(folder: Path, contents: dict[str, str]) -> tuple[str, ...]:
    """Write every file, or nothing: ``folder`` must be new."""
    try:
        with publishing_folder(folder) as hidden:
            for path, text in contents.items():
                (hidden / path).parent.mkdir(parents=True, exist_ok=True)
                (hidden / path).write_text(text, encoding="utf-8")
    except FileExistsError as cause:
        raise taken(folder) from cause
    except OSError as cause:
        why = cause.strerror or str(cause)
        raise InputError(f"{folder} cannot be written", why=why, fix="name a folder that can be written") from cause
    return tuple(contents)


def _compatible(version: str) -> str:
    """The kernels that a plugin written for ``version`` works with: ``0.1.3`` -> ``>=0.1,<0.2``."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}" if major == 0 else f">={major}.{minor},<{major + 1}"
