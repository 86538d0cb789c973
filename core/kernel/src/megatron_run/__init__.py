"""megatron-run: trains transformer language models the Megatron way; every technique is a plugin.

Importing this package imports neither torch nor anything heavy: the public names below are loaded when first used.
"""

from __future__ import annotations

from megatron_run.lazy import lazy_names

__version__ = "0.1.0"

#: Public name -> the module that holds it.
_PUBLIC = {
    "Action": "megatron_run.contracts.schedule",
    "LayoutSpec": "megatron_run.contracts.schedule",
    "Place": "megatron_run.contracts.schedule",
    "ScheduleSpec": "megatron_run.contracts.schedule",
    "PluginInfo": "megatron_run.contracts",
    "RunError": "megatron_run.errors",
    "hookimpl": "megatron_run.hookspecs",
    "load": "megatron_run_inference",
    "load_config": "megatron_run.planning",
}

__all__ = ["__version__", *sorted(_PUBLIC)]  # noqa: PLE0604  # the names are the keys above
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
