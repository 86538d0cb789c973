"""The files of a run's data, each with its hash, as its run folder keeps them: they tell which of them has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from megatron_run.files.safe_folder import SafeFolder

if TYPE_CHECKING:
    from megatron_run_engine.checkpoint.manifest import DataRecord
    from megatron_run_engine.run_folder import RunFolder

#: The file in the run folder, and in the logs of each attempt.
_NAME = "data.json"
#: Files named in one message.
_MOST = 3


def keep_listed(data: DataRecord, folder: RunFolder) -> None:
    """Write the files of ``data`` into ``folder``, for an attempt that has begun; nothing where there are none."""
    if data.listed and not folder.rank:
        folder.write_record(_NAME, {"v": 1, "files": data.files, "listed": dict(data.listed)})
        folder.show_record(_NAME)


def changed_files(home: Path, saved: DataRecord, now: DataRecord) -> str:
    """Which files are not what they were when a run in ``home`` saved a step with ``saved``; empty if nothing tells."""
    before = next((found for found in _kept(home) if found.get("files") == saved.files), {}).get("listed")
    if not isinstance(before, dict) or not now.listed or saved.files == now.files:
        return ""
    found = [*_differences(before, dict(now.listed))] or ["the same files in another order"]
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return ", ".join(found[:_MOST]) + more


def _kept(home: Path) -> Iterator[Mapping[str, Any]]:
    """The records that attempts of the run in ``home`` have kept, that of the newest first."""
    attempts = sorted((path.name for path in home.glob("logs/attempt-*")), key=lambda name: (len(name), name))
    for name in (_NAME, *(f"logs/{attempt}/{_NAME}" for attempt in reversed(attempts))):
        yield SafeFolder(home).read_json(name) or {}


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """A few words for each file that differs. One that was moved is the same by its contents, or by its name."""
    contents, names = set(before.values()), {PurePath(path).name for path in before}
    for path, digest in now.items():
        if digest not in contents:
            yield f"{path} has other contents" if PurePath(path).name in names else f"{path} is new"
    contents, names = set(now.values()), {PurePath(path).name for path in now}
    for path, digest in before.items():
        if digest not in contents and PurePath(path).name not in names:
            yield f"{path} is gone"
