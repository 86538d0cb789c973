"""The run folder: the files of a run, and the rules that protect them.

``open_run_folder`` creates, joins or refuses a folder and takes its lock. ``RunFolder`` knows the paths and maintains
``status.json``. ``History`` reads the numbers that a run has left; ``curves`` reads those of any number of steps, and
``plotting`` draws them.

Importing this package is instant, as what starts and watches ranks needs the paths alone: public names are loaded when
first used.

Imports: checkpoint, config, contracts, data, drawing, errors, files, lazy, planning, registry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.lazy import typed_names

if TYPE_CHECKING:
    from megatron_run_engine.run_folder.folder import RunFolder as RunFolder
    from megatron_run_engine.run_folder.folder import open_log as open_log
    from megatron_run_engine.run_folder.history import History as History
    from megatron_run_engine.run_folder.lock import FolderLock as FolderLock
    from megatron_run_engine.run_folder.opening import OpenedFolder as OpenedFolder
    from megatron_run_engine.run_folder.opening import check_run_folder as check_run_folder
    from megatron_run_engine.run_folder.opening import join_run_folder as join_run_folder
    from megatron_run_engine.run_folder.opening import open_run_folder as open_run_folder
    from megatron_run_engine.run_folder.opening import recording_refusals as recording_refusals
    from megatron_run_engine.run_folder.undoing import REFUSALS as REFUSALS

__getattr__, __dir__, __all__ = typed_names(__name__)
