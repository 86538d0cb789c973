"""The two ways: a model of another program becomes a new folder of ours; a saved step of ours becomes one of theirs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatron_run.errors import CheckpointError
from megatron_run.registry.choose_format import format_to_read, format_to_write
from megatron_run_engine.checkpoint.files import FileSystem, saving
from megatron_run_engine.checkpoint.step_folder import find_step
from megatron_run_engine.formats.weights import count_values, new_folder, read_step, write_folder


@dataclass(frozen=True)
class Imported:
    """What was imported: the ``format`` of the source, the number of weights, the moments, notes for the user."""

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
    """Write the model at ``source`` as the new ``folder``. Its format is ``name``, else recognised from its files.

    ``name`` is that of an installed format, DIST:NAME, or a plugin file. A format that executes what it reads needs
    ``trust_pickle``. Raises a RunError, and then leaves nothing behind.
    """
    chosen = format_to_read(source, name)
    if chosen.made.executes and not trust_pickle:
        raise CheckpointError(
            f"{source} is not read", why=chosen.made.executes, fix="if you trust whoever wrote it: --trust-pickle"
        )
    weights = chosen.read(source)
    manifest = write_folder(weights, folder, f"{source} ({chosen.name})")
    moments = tuple(sorted(field for field, readers in weights.moments.items() if readers))
    return Imported(str(folder), chosen.name, weights.step, count_values(manifest), moments, weights.notes)


def export_model(source: Path | None, folder: Path, name: str, step: int | None = None) -> Exported:
    """Write a saved step in the format ``name`` as the new ``folder``, which appears when it is whole.

    ``source`` is a run folder, its checkpoints or one step; None is the latest run. ``step`` is one of its steps; None
    is the newest. Raises a RunError, and then leaves nothing behind.
    """
    target, files = format_to_write(name), FileSystem()
    checkpoints, chosen = find_step(source, step)
    with saving(f"{folder} could not be written"), new_folder(folder, files):  # an empty folder reserves the name
        temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
        try:
            files.make_folder(temporary)
            with checkpoints.offering_older(chosen, lambda older: f"to export step {older}: --step {older}"):
                weights = read_step(checkpoints, chosen)
            target.write(weights, temporary)
            files.remove_folder(folder)
            files.rename(temporary, folder)
        except BaseException:
            if temporary.is_dir():
                files.remove_tree(temporary)
            raise
        files.sync_folder(folder.parent)
    return Exported(str(checkpoints.path), chosen, str(folder), target.name)
