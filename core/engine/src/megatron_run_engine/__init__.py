"""The engine of megatron-run: what trains. It needs torch; what is decided without it lies in `megatron_run`.

Importing this package is instant: the public names below are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: Public name -> the module that holds it.
_PUBLIC = {
    "BuildContext": "megatron_run_engine.runtime.context",
    "Dtypes": "megatron_run_engine.runtime.context",
    "train": "megatron_run_engine.launch",
}

__all__ = ["__version__", *sorted(_PUBLIC)]  # noqa: PLE0604  # the names are the keys above


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
