"""The names of what is not whole yet: hidden, unlike any other, and locked for as long as their writer is alive."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
from contextlib import suppress

_BEHIND = re.compile(r"\.[0-9a-f]{16}\.tmp")


def temporary_name(name: str) -> str:
    """A new name beside ``name``."""
    return f".{name}.{secrets.token_hex(8)}.tmp"


def lock_new(handle: int) -> bool:
    """Lock what was just made; False if somebody took it for a killed writer's before, and has removed it."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX)
    return os.fstat(handle).st_nlink > 0


def remove_left(name: str, folder: int) -> None:
    """Remove what killed writers of ``name`` have left in the open ``folder``, and nothing of the living ones."""
    for left in os.listdir(folder):
        if left.startswith(f".{name}.") and _BEHIND.fullmatch(left[1 + len(name) :]):
            with suppress(OSError):
                _remove_unlocked(left, folder)


def _remove_unlocked(left: str, folder: int) -> None:
    handle = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            shutil.rmtree(left, dir_fd=folder)
        else:
            os.unlink(left, dir_fd=folder)
    finally:
        os.close(handle)
