"""megatron-run: trains transformer language models the Megatron way; every technique is a plugin.

Importing this package imports neither torch nor anything heavy: the public names below are loaded when first used.
"""

from __future__ import annotations

from megatron_run.lazy import lazy_names

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "megatron_run.contracts": ("PluginInfo",),
        "megatron_run.contracts.schedule": ("Action", "LayoutSpec", "Place", "ScheduleSpec"),
        "megatron_run.errors": ("RunError",),
        "megatron_run.hookspecs": ("hookimpl",),
        "megatron_run.planning": ("load_config",),
        "megatron_run_inference": ("load",),
    },
)
__all__ += ["__version__"]
