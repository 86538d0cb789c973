"""Transformer Engine for the plugins that need it: found, new enough, imported; or one line that says why not.

It is imported with the copies of CUDA's libraries that torch has loaded (:mod:`.cuda_libraries`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from megatron_run.errors import PluginError
from megatron_run.errors.install_hint import how_to_add
from megatron_run_engine.runtime.cuda_libraries import led_to_loaded, variables_kept

if TYPE_CHECKING:
    import torch

#: The variable by which the library is told which frameworks it serves.
FRAMEWORK = "NVTE_FRAMEWORK"
#: An option of pip: the package builds against the torch that is installed.
_ISOLATION = "--no-build-isolation"


@dataclass(frozen=True)
class Need:
    """A plugin's need of the library.

    ``plugin`` is named in messages, as in ``parallel-layer=te``, and ``distribution`` has the extra ``engine``.
    ``reason`` says why ``minimum`` is the oldest release, and ``instead`` what works without the library.
    """

    plugin: str
    distribution: str
    minimum: str
    reason: str
    instead: str

    def refusal(self, what: str, why: str, fix: str) -> PluginError:
        """The error that ends with the plugin's alternative."""
        return PluginError(what, why=why, fix=f"{fix}, or {self.instead}" if fix else self.instead)


def import_transformer_engine(need: Need, device: torch.device, *modules: str) -> list[Any]:
    """Import the (untyped) ``modules`` of the library, such as ``transformer_engine.pytorch``, for a run on ``device``.

    Raises :class:`PluginError` without a GPU, without the library, with its empty meta package, with a release that is
    too old, and with one that cannot be imported.
    """
    if device.type != "cuda":
        raise _no_gpu(need)
    found = installed_version()
    if found is not None and Version(found) < Version(need.minimum):
        install = _install("--upgrade ", f"transformer-engine[pytorch]>={need.minimum}")
        raise need.refusal(f"Transformer Engine {found} is too old for {need.plugin}", need.reason, install)
    if find_spec("transformer_engine") is None:
        install = f"type: {how_to_add(need.distribution, 'engine', _ISOLATION)}"
        raise need.refusal(f"{need.plugin} needs Transformer Engine, which is not installed", "", install)
    try:
        return import_led(*modules)
    except Exception as cause:  # a library built for another machine may raise anything
        raise _why_not_imported(cause, found, need) from cause


def import_led(*modules: str) -> list[Any]:
    """Import ``modules`` of the library with the files of CUDA's libraries that torch uses; raises what it raises.

    Its part for JAX, which it misses with a warning where JAX is installed, is not asked for unless the user does.
    """
    import_module("torch")  # whose libraries are meant: it loads them
    with led_to_loaded(), variables_kept(FRAMEWORK):
        os.environ.setdefault(FRAMEWORK, "pytorch")
        return [import_module(name) for name in modules]


def installed_version() -> str | None:
    """The version in the package's metadata; None without metadata, as on a path added by hand."""
    try:
        return version("transformer-engine")
    except PackageNotFoundError:
        return None


def _no_gpu(need: Need) -> PluginError:
    import torch

    what = f"{need.plugin} needs an NVIDIA GPU"
    if torch.cuda.is_available():
        return need.refusal(what, "this run is on the CPU", "set run.device=cuda")
    return need.refusal(what, "there is none on this machine", "")


def _why_not_imported(cause: Exception, found: str | None, need: Need) -> PluginError:
    """The package on PyPI holds Python files only; its extra ``pytorch`` brings the compiled extension."""
    try:
        version("transformer-engine-torch")
        empty = False
    except PackageNotFoundError:
        empty = isinstance(cause, FileNotFoundError) or "meta package" in str(cause)
    if empty:
        exactly = f"=={found}" if found else f">={need.minimum}"
        return need.refusal(
            "the transformer-engine that is installed is its empty meta package",
            "its extension for PyTorch, transformer-engine-torch, is not installed",
            _install("", f"transformer-engine[pytorch]{exactly}"),
        )
    return need.refusal(
        f"Transformer Engine {found or ''} cannot be imported".replace("  ", " "),
        f"{type(cause).__name__}: {' '.join(str(cause).split())}",
        "see the libraries of CUDA in megatron-run doctor, the whole cause with --debug",
    )


def _install(flags: str, what: str) -> str:
    """The command to type."""
    return f"type: pip install {flags}{_ISOLATION} '{what}'"
