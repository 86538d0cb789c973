"""The run folder: what a run leaves on disk, and who may write into it.

``open_run_folder`` applies the rules by which a folder is created, joined or refused; ``RunFolder`` knows where
everything lies and keeps ``status.json``.

Imports: checkpoint, errors, planning.
"""

from __future__ import annotations

from megatron_run_engine.run_folder.folder import RunFolder, Status
from megatron_run_engine.run_folder.identity import differing_keys, identity
from megatron_run_engine.run_folder.opening import FolderLock, OpenedFolder, join_run_folder, open_run_folder

__all__ = [
    "FolderLock",
    "OpenedFolder",
    "RunFolder",
    "Status",
    "differing_keys",
    "identity",
    "join_run_folder",
    "open_run_folder",
]
