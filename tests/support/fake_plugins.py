"""Installed plugins without an installer: packages and their metadata, written straight into a folder of the path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import NamespaceLoader
from pathlib import Path

import pytest

from megatron_run.contracts import entry_point_group

#: A schedule that runs on one stage; ``{name}`` is its plugin's.
SCHEDULE = """
from megatron_run.contracts.schedule import Action
from megatron_run.contracts import PluginInfo, Schedule
from megatron_run.hookspecs import hookimpl

class Mine(Schedule):
    def actions(self, spec):
        return [[Action(op, m, 0) for m in range(spec.microbatches) for op in "FB"]]

@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("schedule", "{name}")

@hookimpl
def megatron_run_create_schedule():
    return Mine()
"""


def schedule_source(name: str = "zigzag") -> str:
    """The code of a working schedule."""
    return SCHEDULE.replace("{name}", name)


class FakeSite:
    """A folder that looks like site-packages."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    @property
    def path(self) -> list[str]:
        """The search path with this folder alone."""
        return [str(self.folder)]

    def module(self, name: str, source: str) -> Path:
        """Write a package of one module."""
        file = self.folder / name / "__init__.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
        return file

    def distribution(
        self,
        name: str,
        points: Mapping[str, Mapping[str, str]],
        *,
        version: str = "1.0",
        requires: Sequence[str] = ("megatron-run-core>=0.1,<0.2",),
    ) -> Path:
        """Write the metadata of a distribution; ``points`` are entry points by group, or by kind."""
        folder = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (folder / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        sections = []
        for group, entries in points.items():
            full = group if "." in group else entry_point_group(group)
            sections.append(f"[{full}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items()))
        (folder / "entry_points.txt").write_text("\n".join(sections), encoding="utf-8")
        return folder

    def schedule(self, name: str = "zigzag", source: str | None = None, *, distribution: str = "acme-zigzag") -> None:
        """Write a whole distribution with one schedule."""
        package = distribution.replace("-", "_")
        self.module(package, schedule_source(name) if source is None else source)
        self.distribution(distribution, {"schedule": {name: package}})

    @contextmanager
    def importable(self) -> Iterator[None]:
        """Within, the folder is first on the import path; its modules are forgotten afterwards."""
        before = set(sys.modules)
        sys.path.insert(0, str(self.folder))
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(str(self.folder))
            for name, module in list(sys.modules.items()):
                namespace = name not in before and isinstance(getattr(module, "__loader__", None), NamespaceLoader)
                if namespace or str(getattr(module, "__file__", None)).startswith(str(self.folder)):
                    del sys.modules[name]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FakeSite]:
    """A folder on the import path in which a test installs the plugins that it needs."""
    made = FakeSite(tmp_path / "site")
    with made.importable():
        yield made
