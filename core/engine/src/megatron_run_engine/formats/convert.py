"""The two ways: a model from elsewhere into a folder of ours, and a saved step of ours into a folder for elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatron_run_engine.checkpoint.files import FileSystem, saving
from megatron_run_engine.checkpoint.step_folder import find_step
from megatron_run_engine.formats.folder import count_values, new_folder, read_step, write_folder
from megatron_run_engine.formats.formats import read_source, writer


@dataclass(frozen=True)
class Imported:
    """What was imported: the ``format`` of the source, how many weights, whether with moments, what is to be said."""

    folder: str
    format: str
    step: int
    parameters: int
    moments: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    """What was exported: a ``step`` of the run at ``source``."""

    source: str
    step: int
    folder: str
    format: str


def import_model(source: Path, folder: Path, name: str | None = None, *, trust_pickle: bool = False) -> Imported:
    """Write the model at ``source`` as the new folder ``folder``; its format is recognised unless ``name`` says it.

    Raises a RunError; nothing is left behind then.
    """
    chosen, weights = read_source(source, name, trust_pickle=trust_pickle)
    manifest = write_folder(weights, folder, f"{source} ({chosen})")
    moments = tuple(sorted(field for field, readers in weights.moments.items() if readers))
    return Imported(str(folder), chosen, weights.step, count_values(manifest), moments, weights.notes)


def export_model(source: Path | None, folder: Path, name: str, step: int | None = None) -> Exported:
    """Write a saved step in the format ``name`` as the new folder ``folder``, which appears when it is whole.

    ``source`` is a run folder, its checkpoints or one step, None the latest run; ``step`` one of its steps, None the
    newest. Raises a RunError; nothing is left behind then.
    """
    write, files = writer(name), FileSystem()
    checkpoints, chosen = find_step(source, step)
    with saving(f"{folder} could not be written"), new_folder(folder, files):  # the place is taken, and ours
        temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
        try:
            files.make_folder(temporary)
            with checkpoints.offering_older(chosen, lambda older: f"to export step {older}: --step {older}"):
                weights = read_step(checkpoints, chosen)
            write(weights, temporary)
            files.remove_folder(folder)
            files.rename(temporary, folder)
        except BaseException:
            if temporary.is_dir():
                files.remove_tree(temporary)
            raise
        files.sync_folder(folder.parent)
    return Exported(str(checkpoints.path), chosen, str(folder), name)
