"""The engine of megatron-run: what trains. It needs torch; what is decided without it lies in `megatron_run`.

Importing this package is instant: the public names below are loaded when first used.
"""

from __future__ import annotations

from megatron_run.lazy import lazy_names

__version__ = "0.1.0"

#: Public name -> the module that holds it.
_PUBLIC = {
    "BuildContext": "megatron_run_engine.runtime.context",
    "Dtypes": "megatron_run_engine.runtime.context",
    "train": "megatron_run_engine.launch",
}

__all__ = ["__version__", *sorted(_PUBLIC)]  # noqa: PLE0604  # the names are the keys above
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
