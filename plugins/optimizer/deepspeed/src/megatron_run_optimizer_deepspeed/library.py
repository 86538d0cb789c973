"""Finding DeepSpeed, saying what is missing, and importing it quietly. It is imported only when a run is to start."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from megatron_run.errors import PluginError

if TYPE_CHECKING:
    import torch

#: The oldest release with everything that is used.
MINIMUM = "0.19.3"
#: What needs no library, at the end of every message.
_INSTEAD = "choose --plugin optimizer=zero1 or adamw"
#: DeepSpeed looks for the device that it is to use when it is imported, and keeps it for the life of the process.
_DEVICE = "DS_ACCELERATOR"


def find_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a run on ``device``; returns the module ``zero`` of this package, which is written upon it.

    Raises :class:`PluginError` when it is not installed, too old, cannot be imported, or was imported for another kind
    of device.
    """
    if find_spec("deepspeed") is None:
        raise PluginError(
            "optimizer=deepspeed needs DeepSpeed, which is not installed",
            fix=f"{_install('megatron-run-optimizer-deepspeed[library]')}, or {_INSTEAD}",
        )
    found = _installed_version()
    if found is not None and Version(found) < Version(MINIMUM):
        raise PluginError(
            f"DeepSpeed {found} is too old for optimizer=deepspeed",
            why=f"{MINIMUM} or newer is needed",
            fix=f"{_install(f'deepspeed>={MINIMUM}')}, or {_INSTEAD}",
        )
    os.environ.setdefault(_DEVICE, device.type)
    try:
        zero = import_module("megatron_run_optimizer_deepspeed.zero")
    except Exception as cause:  # whatever a library that compiles at import raises
        raise PluginError(
            f"DeepSpeed {found or ''} cannot be imported".replace("  ", " "),
            why=f"{type(cause).__name__}: {' '.join(str(cause).split())}",
            fix=f"see the whole cause with --debug, or {_INSTEAD}",
        ) from cause
    check_kind(zero.device_type(), device)
    return zero


def check_kind(taken: str, device: torch.device) -> None:
    """Raise :class:`PluginError` unless the kind of device that DeepSpeed has ``taken`` is that of ``device``."""
    if taken != device.type:
        raise PluginError(
            f"DeepSpeed has been set up for {taken} in this process, and the run is on {device.type}",
            why=f"it chooses once, by {_DEVICE}={os.environ[_DEVICE]}" if _DEVICE in os.environ else "it chooses once",
            fix=f"set the variable {_DEVICE}={device.type}, or {_INSTEAD}",
        )


def _installed_version() -> str | None:
    """What the metadata says; None where there is none, as on a path that was added by hand."""
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return None


def _install(what: str) -> str:
    """Nothing is compiled: the operators that it could bring are for what is not used here."""
    return f"type: DS_BUILD_OPS=0 pip install '{what}'"
