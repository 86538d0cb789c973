"""Public names that a package loads when they are first used, so that importing the package is instant."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from megatron_run.errors.install_hint import check_installed


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The ``__getattr__``, ``__dir__`` and ``__all__`` of ``package``; ``modules`` maps each module to its names.

    Python calls a module's ``__getattr__`` only for names that the module lacks (PEP 562), so a name that was loaded
    becomes the module's own; none may be called like a submodule. Type checkers do not follow it: a package that wants
    its names typed also imports them for these.
    """
    holders = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in holders:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(holders[name]), name)
        except ModuleNotFoundError as missing:
            check_installed(missing, f"{package}.{name} cannot be used")
            raise
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *holders}), sorted(holders)
