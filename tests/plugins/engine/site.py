"""Transformer Engine as it may be installed: whole, old, empty or broken."""

from __future__ import annotations

from pathlib import Path

from tests.support.fake_plugins import FakeSite

#: What the package on PyPI does when it is imported without its extensions.
_EMPTY = "raise RuntimeError('Found empty `transformer-engine` meta package installed. Install ...')\n"
#: What it does when the library behind it is there and the extension for PyTorch is not.
_NO_EXTENSION = "raise FileNotFoundError('Could not find shared object file for Transformer Engine torch lib.')\n"
_BROKEN = "raise ImportError('libcudnn.so.9: cannot open shared object file')\n"
_STAND_IN = "from tests.plugins.engine.stand_in import *\n"

#: State -> (version or None, source of ``transformer_engine``, of ``transformer_engine.pytorch``, with the extension)
_STATES: dict[str, tuple[str | None, str, str, bool]] = {
    "whole": ("2.20.2", "", _STAND_IN, True),
    "on a path without metadata": (None, "", _STAND_IN, False),
    "old": ("1.13.0", "", "raise AssertionError('it was imported')", True),
    "empty": ("2.20.2", _EMPTY, "", False),
    "without the extension": ("2.13.0", "", _NO_EXTENSION, False),
    "broken": ("2.20.2", "", _BROKEN, True),
}


def engine_site(folder: Path, state: str) -> FakeSite:
    """A folder of packages in which Transformer Engine is in ``state``; ``missing``: not at all."""
    site = FakeSite(folder)
    if state == "missing":
        return site
    version, package, pytorch, extension = _STATES[state]
    site.module("transformer_engine", package)
    site.module("transformer_engine/pytorch", pytorch)
    site.module("transformer_engine/common", "")
    site.module("transformer_engine/common/recipe", "from tests.plugins.engine.recipes import *\n")
    if version:
        site.distribution("transformer-engine", {}, version=version)
    if extension:
        site.distribution("transformer-engine-torch", {}, version=version or "2.20.2")
    return site
