"""Public names that a package loads when they are first used, so that importing the package is instant."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from megatron_run.errors.install_hint import check_installed

#: The ``__getattr__``, ``__dir__`` and ``__all__`` of a package.
Names = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]


def typed_names(package: str) -> Names:
    """The names that ``package`` imports for type checkers alone: its source is the one list of them.

    Raises :class:`ImportError` where it was installed without that.
    """
    import ast  # milliseconds, which a command that needs no such package does without

    loader = sys.modules[package].__spec__.loader  # type: ignore[union-attr]  # a module that runs has one
    source = loader.get_source(package)  # type: ignore[union-attr]  # of files and archives alike
    if source is None:  # bytecode alone, or frozen
        raise ImportError(
            f"{package} is installed without its source, from which its public names are read; "
            "install megatron-run with its .py files",
            name=package,
        )
    found: dict[str, list[str]] = {}
    for block in ast.parse(source).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for each in block.body:
                assert isinstance(each, ast.ImportFrom), ast.unparse(each)
                found.setdefault(each.module or "", []).extend(name.name for name in each.names)
    return lazy_names(package, found)


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Names:
    """``modules`` maps each module to its names, which type checkers do not follow.

    Python calls a module's ``__getattr__`` only for names that the module lacks (PEP 562), so a name that was loaded
    becomes the module's own; none may be called like a submodule.
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
