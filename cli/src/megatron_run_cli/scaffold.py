"""A new plugin package: small, complete, and working from its first minute."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from megatron_run import __version__
from megatron_run.contracts.plugin import RUN_KINDS, check_kind, entry_point_group
from megatron_run.errors import InputError
from megatron_run.registry.discover import KERNEL, Catalog, scan

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Package:
    """A package that was written: its folder, its files relative to it, and how its plugin is chosen.

    ``command`` is what to type to use the plugin once the package is installed.
    """

    folder: Path
    files: tuple[str, ...]
    distribution: str
    choice: str
    command: str


def new(kind: str, name: str, folder: Path | None = None, catalog: Catalog | None = None) -> Package:
    """Write a package with a working plugin ``kind=name`` into ``folder`` (default: named like the distribution).

    Raises :class:`InputError` when the name cannot be a package's or is taken, or the folder exists.
    """
    kind = check_kind(kind, "")
    _check_name(kind, name, scan() if catalog is None else catalog)
    distribution = f"megatron-run-{kind}-{name}"
    folder = Path(distribution) if folder is None else folder
    choice = f"{kind}={'dense+' if kind == 'parallel-layer' else ''}{name}"  # that template stands on another's layers
    use = f"--plugin {choice}" if kind in RUN_KINDS else f"import SOURCE FOLDER --from {name}"
    words = {
        "kind": kind,
        "name": name,
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
    return (KERNEL,) if kind in ("schedule", "observer") else (KERNEL, "megatron-run-engine")


def _check_name(kind: str, name: str, catalog: Catalog) -> None:
    if not _NAME.fullmatch(name):
        better = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        raise InputError(
            f"{name!r} cannot name a plugin",
            why="a name is lower-case letters and digits, joined by single hyphens",
            fix=f"write {better}" if better else "write a name such as zigzag",
        )
    taken = catalog.offering(kind, name)
    if taken:
        raise InputError(f"{kind}={name} is taken by {taken[0].source}", fix="choose another name")


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
        folder.mkdir(parents=True)
    except FileExistsError as cause:
        raise InputError(f"{folder} exists, and nothing is overwritten", fix="name a new folder") from cause
    except OSError as cause:
        raise InputError(f"{folder} cannot be made", why=str(cause), fix="name a folder that can be written") from cause
    try:
        for path, text in contents.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as cause:
        shutil.rmtree(folder, ignore_errors=True)
        raise InputError(f"{folder} cannot be written", why=str(cause)) from cause
    return tuple(contents)


def _compatible(version: str) -> str:
    """The kernels that a plugin written for ``version`` works with: ``0.1.3`` -> ``>=0.1,<0.2``."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}" if major == 0 else f">={major}.{minor},<{major + 1}"
