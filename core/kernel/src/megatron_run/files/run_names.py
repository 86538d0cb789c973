"""The name of a run where several are shown."""

from __future__ import annotations

from pathlib import Path

#: What makes a folder that of a sweep, in which its runs lie: each sweep has a ``run-000``.
SWEEP_RECORD = "sweep.json"


def shown_name(folder: Path) -> str:
    """The last part of the name of a run's ``folder``; of a sweep's run, the sweep's before it."""
    place = folder.absolute()
    return f"{place.parent.name}/{place.name}" if (place.parent / SWEEP_RECORD).is_file() else place.name
