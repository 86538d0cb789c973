"""Finds Transformer Engine, or reports what is missing. It is imported only when a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from packaging.version import Version

from megatron_run.errors import PluginError
from megatron_run_parallel_layer_te import shapes

#: The oldest release with everything used here: ``autocast``, all four FP8 recipes and ``backward_dw``.
MINIMUM = "2.9"
#: The alternative without the library, at the end of every message.
_INSTEAD = "choose --plugin parallel-layer=tensor"


@dataclass(frozen=True)
class Engine:
    """The (untyped) modules ``transformer_engine.pytorch`` and ``transformer_engine.common.recipe``."""

    pytorch: Any
    recipe: Any
    version: str


def find_engine(device: torch.device) -> Engine:
    """Import Transformer Engine for a run on ``device``; the meta device gets :mod:`shapes`, without the library.

    Raises :class:`PluginError` without a GPU, without the library, with its empty meta package, or with an old release.
    """
    if device.type == "meta":
        return Engine(shapes, None, "of shapes alone")
    _need_gpu(device)
    found = _installed_version()
    if found is not None and Version(found) < Version(MINIMUM):
        raise PluginError(
            f"Transformer Engine {found} is too old for parallel-layer=te",
            why=f"{MINIMUM} or newer is needed",
            fix=f"{_install('--upgrade ', f'transformer-engine[pytorch]>={MINIMUM}')}, or {_INSTEAD}",
        )
    if find_spec("transformer_engine") is None:
        raise PluginError(
            "parallel-layer=te needs Transformer Engine, which is not installed",
            fix=f"{_install('', 'megatron-run-parallel-layer-te[engine]')}, or {_INSTEAD}",
        )
    try:
        return Engine(
            import_module("transformer_engine.pytorch"),
            import_module("transformer_engine.common.recipe"),
            found or "of unknown version",
        )
    except Exception as cause:  # a library built for another machine may raise anything
        raise _why_not_imported(cause, found) from cause


def _need_gpu(device: torch.device) -> None:
    if device.type == "cuda":
        return
    here = torch.cuda.is_available()
    raise PluginError(
        "parallel-layer=te needs an NVIDIA GPU",
        why="this run is on the CPU" if here else "there is none on this machine",
        fix=f"{'set run.device=cuda, or ' if here else ''}{_INSTEAD}",
    )


def _installed_version() -> str | None:
    """The version in the package's metadata; None without metadata, as on a path added by hand."""
    try:
        return version("transformer-engine")
    except PackageNotFoundError:
        return None


def _why_not_imported(cause: Exception, found: str | None) -> PluginError:
    """The package on PyPI holds Python files only; its extra ``pytorch`` brings the compiled extension."""
    try:
        version("transformer-engine-torch")
        empty = False
    except PackageNotFoundError:
        empty = isinstance(cause, FileNotFoundError) or "meta package" in str(cause)
    if empty:
        exactly = f"=={found}" if found else f">={MINIMUM}"
        return PluginError(
            "the transformer-engine that is installed is its empty meta package",
            why="its extension for PyTorch, transformer-engine-torch, is not installed",
            fix=f"{_install('', f'transformer-engine[pytorch]{exactly}')}, or {_INSTEAD}",
        )
    return PluginError(
        f"Transformer Engine {found or ''} cannot be imported".replace("  ", " "),
        why=f"{type(cause).__name__}: {' '.join(str(cause).split())}",
        fix=f"see the whole cause with --debug, or {_INSTEAD}",
    )


def _install(flags: str, what: str) -> str:
    """The command to type. The package builds against the installed torch, hence without build isolation."""
    return f"type: pip install {flags}--no-build-isolation '{what}'"
