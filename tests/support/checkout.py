"""The repository as its tests see it: the member distributions, their sources, the files git would keep."""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Member:
    """One distribution of the repository: the kernel, the command line, or a plugin."""

    folder: Path

    def __str__(self) -> str:
        return self.folder.relative_to(ROOT).as_posix()

    @cached_property
    def project(self) -> dict[str, Any]:
        """The ``[project]`` table of its pyproject."""
        return read_project(self.folder)

    @property
    def name(self) -> str:
        """The distribution's name."""
        return str(self.project["name"])

    @property
    def source(self) -> Path:
        """The folder that holds its import package."""
        return self.folder / "src"

    @property
    def package(self) -> str:
        """The name of its one import package."""
        (package,) = (entry.name for entry in self.source.iterdir() if (entry / "__init__.py").is_file())
        return package

    @property
    def files(self) -> frozenset[str]:
        """Every file of the import package, relative to ``src``, as a wheel must hold it."""
        found = (file for file in self.source.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        return frozenset(file.relative_to(self.source).as_posix() for file in found)

    @property
    def modules(self) -> dict[str, Path]:
        """Dotted module name -> file."""
        return {module_name(file.relative_to(self.source)): file for file in sorted(self.source.rglob("*.py"))}


def module_name(file: Path) -> str:
    """``megatron_run_engine/nn/__init__.py`` -> ``megatron_run_engine.nn``."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_project(folder: Path) -> dict[str, Any]:
    """The ``[project]`` table of ``folder``'s pyproject."""
    tables = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    project: dict[str, Any] = tables["project"]
    return project


_CORE = {file.parent.name: Member(file.parent) for file in sorted(ROOT.glob("core/*/pyproject.toml"))}
KERNEL, ENGINE = _CORE["kernel"], _CORE["engine"]
INFERENCE, PLANNER, TESTING = _CORE["inference"], _CORE["planner"], _CORE["testing"]
#: What stands on these two: planner, inference, suites and the like.
UPON = tuple(each for each in _CORE.values() if each not in (KERNEL, ENGINE))
COMMAND_LINE = Member(ROOT / "cli")
PLUGINS = tuple(Member(file.parent) for file in sorted(ROOT.glob("plugins/*/*/pyproject.toml")))
MEMBERS = (KERNEL, ENGINE, *UPON, COMMAND_LINE, *PLUGINS)


def kept_files() -> list[Path]:
    """The files that are committed, or would be: everything git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    return [file for name in listed.split("\0") if name and (file := ROOT / name).is_file()]
