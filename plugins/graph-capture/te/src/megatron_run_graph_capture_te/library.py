"""Finds ``make_graphed_callables``, or reports what is missing. Only this module imports Transformer Engine.

The library takes neither the generators to register with its graphs nor the error mode of its captures as arguments;
:class:`Engine` arranges both around the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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


@dataclass(frozen=True)
class Engine:
    """The (untyped) ``make_graphed_callables``, and the module ``transformer_engine.pytorch.distributed``."""

    make_graphed_callables: Callable[..., Any]
    distributed: Any

    @contextmanager
    def registering(self, generators: Sequence[torch.Generator]) -> Iterator[None]:
        """Within: every graph registers ``generators``, besides the device's default one, which each registers itself.

        A kernel that draws from another generator ends the capture.
        """
        before = self.distributed.get_all_rng_states()
        ours = {f"megatron-run-{number}": generator for number, generator in enumerate(generators)}
        self.distributed.set_all_rng_states({**before, **ours})
        try:
            yield
        finally:
            self.distributed.set_all_rng_states(before)


@contextmanager
def captures_of_one_thread() -> Iterator[None]:
    """Within: ``torch.cuda.graph`` lets other threads do what a capture forbids.

    By default it forbids it to all: a thread that saves a checkpoint in the background waits for events and pins
    memory, which would end the capture and raise in that thread. The library has no argument for it.
    """
    before = torch.cuda.graph
    torch.cuda.graph = partial(before, capture_error_mode="thread_local")  # type: ignore[misc, assignment]  # a class
    try:
        yield
    finally:
        torch.cuda.graph = before  # type: ignore[misc]  # a class


def find_engine(device: torch.device) -> Engine:
    """The library, for graphs on ``device``.

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
            fix=f"{_install('megatron-run-graph-capture-te[engine]')}, or {_INSTEAD}",
        )
    try:
        library = import_module("transformer_engine.pytorch")
        return Engine(library.make_graphed_callables, import_module("transformer_engine.pytorch.distributed"))
    except Exception as cause:  # the empty meta package raises RuntimeError, a broken build anything
        raise _why_not_imported(cause) from cause


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
