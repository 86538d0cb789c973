"""The runs that a user names: folders of runs, and of sweeps, which stand for their runs, as ``runs/*`` has both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from megatron_run.errors import InputError
from megatron_run.files.latest_run import follow_latest
from megatron_run.files.run_names import SWEEP_RECORD
from megatron_run_report.record import Record

#: The most runs of one sweep that are read.
_RUNS = 1000


def named_runs(paths: Sequence[Path], tell: Callable[[str], None]) -> list[Record]:
    """The runs of ``paths``, each once and in their order; a sweep's stand in its place.

    ``tell`` gets a line for what lies among several and is no run. Raises :class:`InputError` where something is not
    there at all, which was mistyped, and where nothing is a run.
    """
    found: dict[Path, Record] = {}
    refused: list[InputError] = []
    for path in (each for named in paths for each in _runs_in(named)):
        try:
            record = Record(path)
        except InputError as error:
            if not path.expanduser().exists():
                raise
            refused.append(error)
            continue
        found.setdefault(record.folder.resolve(), record)  # runs/* has runs/latest too
    if not found and refused:
        raise refused[0]
    for each in refused:
        tell(f"left out: {each.what}: {each.why}")
    return [*found.values()]


def _runs_in(path: Path) -> Iterator[Path]:
    """The runs of the sweep in ``path``; ``path`` itself where it is no sweep, or none of its runs has begun."""
    folder = follow_latest(path.expanduser())
    runs = sorted(islice(folder.glob("run-*"), _RUNS)) if (folder / SWEEP_RECORD).is_file() else ()
    yield from runs or (path,)
