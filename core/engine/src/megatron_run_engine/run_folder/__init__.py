"""The run folder: the files of a run, and the rules that protect them.

``open_run_folder`` creates, joins or refuses a folder and takes its lock. ``RunFolder`` knows the paths and maintains
``status.json``. ``History`` reads the numbers that a run has left; ``curves`` reads those of any number of steps, and
``plotting`` draws them.

Imports: checkpoint, config, contracts, data, drawing, errors, files, planning, registry.
"""

from __future__ import annotations

from megatron_run_engine.run_folder.folder import RunFolder, open_log
from megatron_run_engine.run_folder.history import History
from megatron_run_engine.run_folder.lock import FolderLock
from megatron_run_engine.run_folder.opening import (
    OpenedFolder,
    check_run_folder,
    join_run_folder,
    open_run_folder,
)
from megatron_run_engine.run_folder.undoing import REFUSALS

__all__ = [
    "REFUSALS",
    "FolderLock",
    "History",
    "OpenedFolder",
    "RunFolder",
    "check_run_folder",
    "join_run_folder",
    "open_log",
    "open_run_folder",
]
