"""The files of a run's data, each with its hash, as its run folder keeps them: they tell which of them has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from megatron_run.files.safe_folder import SafeFolder
from megatron_run_engine.checkpoint.manifest import Record, Xxh3

if TYPE_CHECKING:
    from megatron_run_engine.checkpoint.manifest import DataRecord
    from megatron_run_engine.run_folder import RunFolder

#: The file in the run folder, and in the logs of each attempt.
_NAME = "data.json"
#: Files named in one message.
_MOST = 3


class _Kept(Record):
    """The file: XXH3 of all files of the data, and of each by its path."""

    v: Literal[1] = 1
    files: Xxh3 | None
    listed: Mapping[str, Xxh3]


def keep_listed(data: DataRecord, folder: RunFolder) -> None:
    """Write the files of ``data`` into ``folder``, for an attempt that has begun; nothing where there are none."""
    if data.listed and not folder.rank:
        folder.write_record(_NAME, _Kept(files=data.files, listed=dict(data.listed)).model_dump())
        folder.show_record(_NAME)


def changed_files(home: Path, saved: DataRecord, now: DataRecord) -> str:
    """Which files are not what they were when a run in ``home`` saved a step with ``saved``; empty if nothing tells."""
    kept = next((found for found in _kept(home) if found.files == saved.files), None)
    if kept is None or not now.listed or saved.files == now.files:
        return ""
    found = [*_differences(kept.listed, dict(now.listed))] or ["the same files in another order"]
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return ", ".join(found[:_MOST]) + more


def _kept(home: Path) -> Iterator[_Kept]:
    """The records that attempts of the run in ``home`` have kept, that of the newest first; others are passed over."""
    attempts = sorted((path.name for path in home.glob("logs/attempt-*")), key=lambda name: (len(name), name))
    for name in (_NAME, *(f"logs/{attempt}/{_NAME}" for attempt in reversed(attempts))):
        with suppress(ValidationError):  # the folder may be anybody's
            yield _Kept.model_validate(SafeFolder(home).read_json(name) or {})


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
