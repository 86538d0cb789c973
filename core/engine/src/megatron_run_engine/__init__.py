"""The engine of megatron-run: what trains. It needs torch; what is decided without it lies in `megatron_run`.

Importing this package is instant: the public names below are loaded when first used. What plugins are made from lies in
packages, of which ``docs/plugin-authors.md`` lists the public ones.
"""

from __future__ import annotations

from megatron_run.lazy import lazy_names

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(
    __name__, {"megatron_run_engine.launch": ("train",), "megatron_run_engine.run_folder": ("History",)}
)
__all__ += ["__version__"]
