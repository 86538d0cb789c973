"""Models that were trained or imported, put to use: loaded on any topology, called, and made to write.

Reading order: ``source`` (what lies in a folder), ``network`` (this rank's part of the model, with its weights),
``text_stream`` (token by token to text), ``loaded_model`` (what a user of Python holds), ``loading`` (how it gets
there), ``conversation`` (a talk with it), ``job`` (what the ranks of a command do), ``evaluation`` and ``harness``
(what a model knows).

Importing this package is instant: the public names below are loaded when first used.
"""

from __future__ import annotations

from megatron_run.lazy import lazy_names

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "megatron_run_inference.loaded_model": ("LoadedModel",),
        "megatron_run_inference.loading": ("load",),
        "megatron_run_inference.text_stream": ("Completion",),
        "megatron_run_inference.writing": ("Writing",),
    },
)
__all__ += ["__version__"]
