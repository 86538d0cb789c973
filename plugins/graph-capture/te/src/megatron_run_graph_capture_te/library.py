"""Finds ``make_graphed_callables``, or reports what is missing. Only this module imports Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from packaging.version import Version

from megatron_run.errors import PluginError

#: The oldest release that shares buffers between graphs, so that memory does not grow with microbatches.
MINIMUM = "2.7"
#: The alternative without the library, at the end of every message.
_INSTEAD = "choose --plugin graph-capture=partial"
#: ``make_graphed_callables``, which is untyped.
Engine = Callable[..., Any]


def find_engine(device: torch.device) -> Engine:
    """``transformer_engine.pytorch.make_graphed_callables``, for graphs on ``device``.

    Raises :class:`PluginError` without a GPU, without the library, with its empty meta package, with one that cannot be
    imported, and with one that is too old.
    """
    if device.type != "cuda":
        raise PluginError("graph-capture=te needs an NVIDIA GPU", why=f"this run is on {device}", fix=_INSTEAD)
    found = _installed_version()
    if found is not None and Version(found) < Version(MINIMUM):
        raise PluginError(
            f"Transformer Engine {found} is too old for graph-capture=te",
            why=f"{MINIMUM} is the first whose graphs share their buffers",
            fix=f"{_install(f'transformer-engine[pytorch]>={MINIMUM}')}, or {_INSTEAD}",
        )
    if find_spec("transformer_engine") is None:
        raise PluginError(
            "graph-capture=te needs Transformer Engine, which is not installed",
            fix=f"{_install(f'transformer-engine[pytorch]>={MINIMUM}')}, or {_INSTEAD}",
        )
    try:
        engine: Engine = import_module("transformer_engine.pytorch").make_graphed_callables
    except Exception as cause:  # the empty meta package raises RuntimeError, a broken build anything
        raise _why_not_imported(cause) from cause
    return engine


def _installed_version() -> str | None:
    """The version in the package's metadata; None without metadata, as on a path added by hand."""
    try:
        return version("transformer-engine")
    except PackageNotFoundError:
        return None


def _why_not_imported(cause: Exception) -> PluginError:
    if "meta package" in str(cause):
        return PluginError(
            "the transformer-engine that is installed is its empty meta package",
            why="its extension for PyTorch is not installed",
            fix=f"{_install('transformer-engine[pytorch]')}, or {_INSTEAD}",
        )
    return PluginError(
        "Transformer Engine cannot be imported",
        why=f"{type(cause).__name__}: {' '.join(str(cause).split())}",
        fix=f"see the whole cause with --debug, or {_INSTEAD}",
    )


def _install(what: str) -> str:
    """The command to type. The package builds against the installed torch, hence without build isolation."""
    return f"type: pip install --no-build-isolation '{what}'"
