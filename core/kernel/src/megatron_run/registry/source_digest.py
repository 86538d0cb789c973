"""SHA-256 digests of plugins' source code, by which ranks detect that they run different code."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType


class SourceDigests:
    """Digests of modules, cached by package."""

    def __init__(self) -> None:
        self._known: dict[ModuleType, str] = {}

    def of(self, module: ModuleType) -> str:
        """As :func:`source_digest`."""
        package = _outermost_package(module)
        if package not in self._known:
            self._known[package] = _digest(package)
        return self._known[package]


def source_digest(module: ModuleType) -> str:
    """SHA-256 over the Python files of the package that ``module`` belongs to, or over its one file.

    The files are found through the imported module and not through the distribution's RECORD, which lists no sources
    when it is installed as editable. Names are part of the digest, relative to the package.
    """
    return _digest(_outermost_package(module))


def _digest(package: ModuleType) -> str:
    if not hasattr(package, "__path__"):
        return sha256(_bytes_of(package)).hexdigest()
    total = sha256()
    for folder in map(Path, package.__path__):
        for file in sorted(folder.rglob("*.py")):
            code = file.read_bytes()
            total.update(f"{file.relative_to(folder).as_posix()} {len(code)}\n".encode() + code)
    return total.hexdigest()


def _outermost_package(module: ModuleType) -> ModuleType:
    """The outermost regular package around ``module``; namespace packages are skipped, since others share them."""
    parts = module.__name__.split(".")
    for count in range(1, len(parts)):
        package = sys.modules.get(".".join(parts[:count]))
        if package is not None and getattr(package, "__file__", None):
            return package
    return module


def _bytes_of(module: ModuleType) -> bytes:
    """The module's file; its name where there is no file, as in a notebook."""
    file = getattr(module, "__file__", None)
    return Path(file).read_bytes() if file else module.__name__.encode()
