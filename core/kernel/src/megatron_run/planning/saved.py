"""What a run folder says of a plugin that is missing here: who saved with it, and in which version."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_run.config.layers import Layer


def saved_with(layer: Layer, kind: str, word: str) -> str:
    """``step 300 of runs/mine was saved with acme-zigzag==0.3.0``; empty where nothing was saved with such a plugin.

    A hint for a message: the manifest is read without the checks that the engine makes before it loads anything.
    """
    folder = layer.values.get(("run", "folder"))
    if folder is None or folder.data is None:
        return ""
    path = Path(str(folder.data)).expanduser()
    try:
        manifests = {int(file.parent.name[4:]): file for file in path.glob("checkpoints/step*/manifest.json")}
        step = max(manifests)
        writers = json.loads(manifests[step].read_bytes())["manifest"]["about"]["plugins"][kind]
        saved = [
            f"{one['distribution']}=={one['version']}" for one in writers if one["name"] == word.rpartition(":")[2]
        ]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return f"step {step} of {path} was saved with {saved[0]}" if saved else ""
