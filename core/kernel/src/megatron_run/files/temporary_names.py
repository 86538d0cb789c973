"""The names of what is not whole yet: hidden, unlike any other, and locked for as long as their writer is alive."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

#: Bytes of a name that may be longer by what is around it here.
_LONGEST = 200


def temporary_name(name: str) -> str:
    """A new name beside ``name``, of a writer on this host."""
    return f".{_stem(name)}.{_host()}{secrets.token_hex(4)}.tmp"


def _stem(name: str) -> str:
    encoded = os.fsencode(name)
    return name if len(encoded) <= _LONGEST else hashlib.sha256(encoded).hexdigest()


@cache
def _host() -> str:
    """This host in eight digits: a lock may say nothing of the writers on others."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def lock_new(handle: int) -> bool:
    """Lock what was just made; False if somebody took it for a killed writer's before, and has removed it."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX)
    return os.fstat(handle).st_nlink > 0


def remove_left(name: str, folder: int) -> None:
    """Remove what killed writers of ``name``, of this host, have left in the open ``folder``, and no living one's."""
    for left in _temporary_files(name, folder):
        with suppress(OSError), _unlocked(left, folder) as handle:
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                shutil.rmtree(left, dir_fd=folder)
            else:
                os.unlink(left, dir_fd=folder)


def writer_was_killed(name: str, folder: int) -> bool | None:
    """Whether killed writers of ``name``, of this host, alone have temporary files in ``folder``; None without any."""
    found = _temporary_files(name, folder)
    try:
        for left in found:
            with _unlocked(left, folder):
                pass
    except OSError:
        return False
    return True if found else None


def _temporary_files(name: str, folder: int) -> list[str]:
    pattern = re.compile(rf"\.{re.escape(_stem(name))}\.{_host()}[0-9a-f]{{8}}\.tmp")
    return [each for each in os.listdir(folder) if pattern.fullmatch(each)]


@contextmanager
def _unlocked(left: str, folder: int) -> Iterator[int]:
    """A handle that has locked ``left`` meanwhile. Raises OSError where a living writer has."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(left, os.O_RDWR | flags, dir_fd=folder)  # NFS locks only what may be written
    except IsADirectoryError:
        handle = os.open(left, os.O_RDONLY | flags, dir_fd=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield handle
    finally:
        os.close(handle)
