"""The folder of this host's memory in which runs have their homes: whether it will do, and what nobody needs of it."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_run.errors import InputError
from megatron_run.files.safe_folder import SafeFolder

if TYPE_CHECKING:
    from megatron_run.contracts.schema import CheckpointSection

#: The memory file system of Linux, and the kinds there are.
SHARED_MEMORY, _KINDS = Path("/dev/shm"), ("tmpfs", "ramfs")
#: What is mounted where, of which file system.
_MOUNTS = Path("/proc/self/mountinfo")
#: In a home: whose it is, and which attempt was the last here; has the token by which ranks see that they share it.
RECORD = "home.json"
_RUN_ID = re.compile("[0-9a-f]{32}")
#: Seconds after which a home that nobody has changed may be one of a run that is gone.
_IDLE = 3600.0
OFF = "or without: --set checkpoint.memory_interval=0"


def memory_folder(section: CheckpointSection) -> Path:
    """The folder of all homes on this host. Raises :class:`InputError` where there is none."""
    asked = section.memory_folder
    path = SHARED_MEMORY if asked is None else Path(os.path.expandvars(asked)).expanduser().absolute()
    if unset := re.search(r"\$(\w+|\{\w+\})", str(path)):
        raise InputError(
            f"checkpoint.memory_folder={asked} names no folder of this host",
            why=f"its environment does not set {unset[1].strip('{}')}",
            fix=f"set it, name another folder of a tmpfs, {OFF}",
        )
    if not path.is_dir():
        why = "unset, it is Linux's /dev/shm" if asked is None else ""
        raise InputError(
            f"there is no folder {path} for steps in memory",
            why=why,
            fix=f"set checkpoint.memory_folder to a folder of a tmpfs, {OFF}",
        )
    return path


def user_folder(folder: Path) -> Path:
    """The folder of this user's homes in the memory ``folder``."""
    return folder / f"megatron-run-{os.geteuid()}"


def check_writable(folder: Path) -> None:
    """Raise :class:`InputError` unless this user can have homes in the memory ``folder``."""
    if os.path.lexists(user_folder(folder)):
        check_private(user_folder(folder))
    elif not os.access(folder, os.W_OK | os.X_OK):
        raise unusable(folder, "this user may not write there")


def check_private(path: Path) -> None:
    """Raise :class:`InputError` unless ``path`` is a folder of this user that nobody else may enter."""
    found = path.lstat()
    why = ""
    if stat.S_ISLNK(found.st_mode):
        why = f"it is a symbolic link to {path.readlink()}"
    elif not stat.S_ISDIR(found.st_mode):
        why = "it is no folder"
    elif found.st_uid != os.geteuid():
        why = f"it belongs to another user, number {found.st_uid}"
    elif found.st_mode & 0o077:
        why = f"others may enter it: its mode is {stat.S_IMODE(found.st_mode):04o}"
    if why:
        raise unusable(path, why, first="remove it, ")


def unusable(path: Path, why: str, first: str = "") -> InputError:
    """The refusal of ``path``, which is the user's choice or lies below it; ``first`` is what else may be done."""
    fix = f"{first}set checkpoint.memory_folder to a folder of another tmpfs, {OFF}"
    return InputError(f"{path} cannot hold steps in memory", why=why, fix=fix)


def disk_under(folder: Path) -> str:
    """The file system of ``folder`` where that is none of memory; empty where it is, or is not known."""
    kind, longest = "", -1
    with suppress(OSError):
        place = folder.resolve()
        for line in _MOUNTS.read_text("utf-8", "surrogateescape").splitlines():
            where, _, of = line.partition(" - ")
            mount = Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), where.split()[4]))
            if place.is_relative_to(mount) and len(mount.parts) >= longest:  # a later one lies over those before
                kind, longest = of.split()[0], len(mount.parts)
    return "" if kind in _KINDS else kind


def reclaimable(folder: Path, run: Path | None) -> int:
    """The bytes in the memory ``folder`` of the run in the run folder ``run``, and of homes that it will remove."""
    homes = {path for path, _ in useless_homes(user_folder(folder))}
    if run is not None and (own := own_home(folder, run)) is not None:
        homes.add(own)
    return sum(_size(Path(place, name)) for home in homes for place, _, names in os.walk(home) for name in names)


def _size(path: Path) -> int:
    with suppress(OSError):  # removed meanwhile
        return path.lstat().st_size
    return 0


def useless_homes(user: Path) -> Iterator[tuple[Path, str]]:
    """The homes in the folder ``user`` of runs that are finished, or whose folders are gone, and which of both.

    A run folder that cannot be seen, as on a file system that is not mounted, is not gone; and only what nobody has
    touched for an hour is taken for lost: a container may share the memory of a host and not its disks.
    """
    for path in sorted(user.iterdir()) if user.is_dir() else ():
        record = SafeFolder(path).read_json(RECORD) if _RUN_ID.fullmatch(path.name) else None
        with suppress(OSError):  # another run removes it, or may not see its run folder
            if record is not None and (why := _why_useless(path, Path(str(record.get("folder"))))):
                yield path, why


def _why_useless(path: Path, home: Path) -> str:
    """Why nobody will resume the run in the run folder ``home`` from memory at ``path``; empty if somebody may."""
    status = SafeFolder(home).read_json("status.json") or {}
    if run_in(home) == path.name:
        return f"the run in {home} is finished" if status.get("state") == "finished" else ""
    if not home.parent.is_dir() or time.time() - path.stat().st_mtime < _IDLE:
        return ""
    return f"{home} is the folder of another run" if home.is_dir() else f"its run folder {home} is gone"


def own_home(folder: Path, run: Path) -> Path | None:
    """The home in the memory ``folder`` of the run in the run folder ``run``; None where there is no run yet."""
    name = str(run_in(run))
    return user_folder(folder) / name if _RUN_ID.fullmatch(name) else None


def run_in(home: Path) -> object:
    """The identifier of the run in the run folder ``home``; None where there is none."""
    return (SafeFolder(home).read_json("run.json") or {}).get("id")
