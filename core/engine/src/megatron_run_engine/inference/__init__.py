"""Models that were trained or imported, put to use: loaded on any topology, called, and made to write.

Reading order: ``source`` (what lies in a folder), ``network`` (this rank's part of the model, with its weights),
``text_stream`` (token by token to text), ``loaded_model`` (what a user of Python holds), ``conversation`` (a talk with
it), ``job`` (what the ranks of a command do).

Imports: checkpoint, config, contracts, data, errors, evaluation, files, formats, host, planning, registry, run_folder,
runtime, training.
"""

from __future__ import annotations

from megatron_run_engine.inference.loaded_model import LoadedModel, load
from megatron_run_engine.inference.text_stream import Completion
from megatron_run_engine.inference.writing import Writing

__all__ = ["Completion", "LoadedModel", "Writing", "load"]
