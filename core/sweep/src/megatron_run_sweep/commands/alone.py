"""The lock of a sweep's folder: one sweep at a time reads its record there, trains, and writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_run.errors import InputError
from megatron_run.errors.install_hint import check_engine
from megatron_run.files.publishing import publishing_folder
from megatron_run_sweep.outcomes import EXCLUSIVE
from megatron_run_sweep.record import cannot_hold


def check_trains() -> None:
    """Raise :class:`EngineMissingError` where the engine is not installed, without which no run trains."""
    try:
        import megatron_run_engine.run_folder.lock  # noqa: F401
    except ModuleNotFoundError as error:
        check_engine(error, "this machine cannot train the runs of a sweep")
        raise


@contextmanager
def alone(home: Path) -> Iterator[None]:
    """Within: no other sweep uses the folder ``home``, which is made with its parents where it is missing.

    Raises :class:`InputError` naming the process that does, or for what cannot be a folder.
    """
    from megatron_run_engine.run_folder.lock import FolderLock

    try:
        _make(home)
        lock = FolderLock(home)
    except InputError as error:
        fix = "look at it with --table, or wait for it"
        if os.path.lexists(home / EXCLUSIVE):
            fix = f"{fix}; {error.fix}"
        raise InputError(f"the sweep in {home} is under way", why=error.why, fix=fix) from None
    except OSError as error:
        raise cannot_hold(home, error) from None
    with lock:
        yield


def _make(home: Path) -> None:
    """Make the folder. Raises OSError."""
    try:
        if not home.is_dir():
            with publishing_folder(home):
                pass
    except OSError:
        if not home.is_dir():  # else another sweep has made it meanwhile
            raise
