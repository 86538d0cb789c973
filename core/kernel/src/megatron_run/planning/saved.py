"""What a run folder knows of a plugin that is missing here: who saved with it, and in which version."""

from __future__ import annotations

from pathlib import Path

from megatron_run.config.layers import Layer
from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.step_folder import CHECKPOINTS, Checkpoints


def saved_with(layer: Layer, kind: str, word: str) -> str:
    """``step 300 of runs/mine was saved with acme-zigzag==0.3.0``; empty where nothing was saved with such a plugin."""
    folder = layer.values.get(("run", "folder"))
    if folder is None or folder.data is None:
        return ""
    path = Path(str(folder.data)).expanduser()
    checkpoints = Checkpoints(path / CHECKPOINTS)
    try:
        steps = checkpoints.steps()
        writers = checkpoints.manifest(steps[-1]).about.plugins.get(kind, ()) if steps else ()
    except (CheckpointError, OSError):
        return ""
    sources = [writer.source for writer in writers if writer.name == word.rpartition(":")[2]]
    return f"step {steps[-1]} of {path} was saved with {sources[0]}" if sources else ""
