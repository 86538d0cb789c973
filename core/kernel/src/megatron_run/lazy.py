"""Public names that a package loads when they are first used, so that importing the package is instant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from megatron_run.errors.install_hint import check_installed


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of ``package``; ``modules`` maps each public name to its module.

    Python calls a module's ``__getattr__`` only for names that the module lacks (PEP 562).
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(modules[name]), name)
        except ModuleNotFoundError as missing:
            check_installed(missing, f"{package}.{name} cannot be used")
            raise

    def names() -> list[str]:
        return sorted(("__version__", *modules))

    return load, names
