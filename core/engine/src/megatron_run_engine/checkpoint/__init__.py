"""Checkpoints: folders of safetensors shards and a manifest. A committed step is never lost or overwritten.

A save: every rank writes its shards (``shard_file``), then rank 0 writes the manifest and renames the folder
(``saving``). A load: all ranks verify the files (``step_folder``), then each reads its boxes (``reader``), merged where
a step holds adapters alone (``adapted``). What travels beside the steps: ``kept_files``.
``training.state`` lists every refusal of a checkpoint with the function that raises it.

Imports: contracts, data, errors, files, runtime.
"""
