"""megatron-run: trains transformer language models the Megatron way; every technique is a plugin.

Importing this package imports neither torch nor anything heavy: the public names below are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: Public name -> the module that holds it.
_PUBLIC = {
    "Action": "megatron_run.contracts.actions",
    "LayoutSpec": "megatron_run.contracts.actions",
    "Place": "megatron_run.contracts.actions",
    "ScheduleSpec": "megatron_run.contracts.actions",
    "PluginInfo": "megatron_run.contracts",
    "RunError": "megatron_run.errors",
    "hookimpl": "megatron_run.hookspecs",
    "load_config": "megatron_run.planning",
}

__all__ = ["__version__", *sorted(_PUBLIC)]  # noqa: PLE0604  # the names are the keys above


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
