"""Finds DeepSpeed, or reports what is missing, and imports it quietly: only when a run starts."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from packaging.version import Version

from megatron_run.errors import PluginError
from megatron_run.errors.install_hint import how_to_add

if TYPE_CHECKING:
    import torch

    from megatron_run_engine.runtime import BuildContext


#: The oldest release that has everything used here.
MINIMUM = "0.19.3"
#: The alternatives without the library, at the end of every message.
_INSTEAD = "choose --plugin optimizer=zero1 or adamw"
#: At import DeepSpeed chooses its device by this variable or by itself, for the life of the process.
_DEVICE = "DS_ACCELERATOR"


def find_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a run on ``device``, and return this package's module ``zero``, which uses it.

    Raises :class:`PluginError` if it is not installed, too old, cannot be imported, or was imported for another kind of
    device.
    """
    if find_spec("deepspeed") is None:
        raise PluginError(
            "optimizer=deepspeed needs DeepSpeed, which is not installed",
            fix=f"{_typed(how_to_add('megatron-run-optimizer-deepspeed', 'library'))}, or {_INSTEAD}",
        )
    found = _installed_version()
    if found is not None and Version(found) < Version(MINIMUM):
        newer = f"pip install 'deepspeed>={MINIMUM}'"
        raise PluginError(
            f"DeepSpeed {found} is too old for optimizer=deepspeed",
            why=f"{MINIMUM} or newer is needed",
            fix=f"{_typed(newer)}, or {_INSTEAD}",
        )
    os.environ.setdefault(_DEVICE, device.type)
    try:
        zero = import_module("megatron_run_optimizer_deepspeed.zero")
    except Exception as cause:  # a library that compiles at import may raise anything
        raise PluginError(
            f"DeepSpeed {found or ''} cannot be imported".replace("  ", " "),
            why=f"{type(cause).__name__}: {' '.join(str(cause).split())}",
            fix=f"see the whole cause with --debug, or {_INSTEAD}",
        ) from cause
    check_kind(zero.device_type(), device)
    return zero


def check_kind(taken: str, device: torch.device) -> None:
    """Raise :class:`PluginError` unless DeepSpeed uses (``taken``) the kind of device of ``device``."""
    if taken != device.type:
        raise PluginError(
            f"DeepSpeed has been set up for {taken} in this process, and the run is on {device.type}",
            why=f"it chooses once, by {_DEVICE}={os.environ[_DEVICE]}" if _DEVICE in os.environ else "it chooses once",
            fix=f"set the variable {_DEVICE}={device.type}, or {_INSTEAD}",
        )


def _installed_version() -> str | None:
    """The version in the package's metadata; None without metadata, as on a path added by hand."""
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return None


def _typed(install: str) -> str:
    """The command to type. It compiles no operators: none is used here."""
    return f"type: DS_BUILD_OPS=0 {install}"


def data_group(context: BuildContext) -> Any:
    """The process group of this rank's replicas. Collective with one replica: creates the groups.

    A world of one rank has no default process group; the one made here stays for the life of the process, as
    DeepSpeed's own settings do.
    """
    group = context.groups.group("replicas")
    if group is not None:
        return group
    if not dist.is_initialized():
        backend = "nccl" if context.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]  # exported, but missing in the stubs
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    # new_group is collective: every rank makes the groups of all ranks, in the same order.
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return alone[dist.get_rank()]
