"""Checkpoints: folders of safetensors shards and a manifest. A committed step is never lost or overwritten.

A save: every rank writes its shards (``shard_file``), then rank 0 writes the manifest and renames the folder
(``saving``). A load: all ranks verify the files (``step_folder``), then each reads its boxes (``reader``), merged where
a step holds adapters alone (``adapted``). What travels beside the steps: ``kept_files``.
``training.state`` lists every refusal of a checkpoint with the function that raises it.

Imports: contracts, data, errors, files, lazy, runtime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.lazy import typed_names

if TYPE_CHECKING:
    from megatron_run_engine.checkpoint.boxes import Box as Box
    from megatron_run_engine.checkpoint.boxes import cover_fault as cover_fault
    from megatron_run_engine.checkpoint.files import FileSystem as FileSystem
    from megatron_run_engine.checkpoint.files import followed as followed
    from megatron_run_engine.checkpoint.files import read_whole as read_whole
    from megatron_run_engine.checkpoint.files import reading as reading
    from megatron_run_engine.checkpoint.reader import TensorFile as TensorFile
    from megatron_run_engine.checkpoint.shard_file import TensorEntry as TensorEntry
    from megatron_run_engine.checkpoint.shard_file import write_tensors as write_tensors

__getattr__, __dir__, __all__ = typed_names(__name__)
