"""Files of the user's that a command makes: all of them appear whole, or none does, however the command ends."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

#: What is around a file's name while it is written.
_BEFORE, _BEHIND = ".", re.compile(r"\.[0-9a-f]{16}\.tmp")


class Publication:
    """Temporary files beside ``paths``, in :attr:`files`, which :meth:`publish` gives their names.

    Until then whoever reads sees what was there before. What a killed writer of the same ``paths`` has left is removed;
    the lock of a temporary file says that its writer is alive. Raises OSError.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        with ExitStack() as stack:
            #: A file for each path, to be written.
            self.files: tuple[BinaryIO, ...] = tuple(stack.enter_context(_hidden(path)) for path in paths)
            self._stack = stack.pop_all()

    def publish(self) -> None:
        """Put the files on the disk, and then give them their names.

        Of several, the old file of the last name goes first and the new one comes last: where it is, all belong
        together. On an error the paths are as they were, unless a file system refuses a name after it has taken one.
        """
        try:
            for file in self.files:
                file.flush()
                os.fsync(file.fileno())
            for path in self._paths[1:][-1:]:
                path.unlink(missing_ok=True)
            self._name()
        finally:
            self.discard()
        for folder in {path.parent for path in self._paths}:
            _sync(folder)

    def _name(self) -> None:
        made: list[Path] = []
        try:
            for file, path in zip(self.files, self._paths, strict=True):
                made += [] if path.exists() else [path]
                Path(file.name).replace(path)
        except OSError:
            for path in made:
                path.unlink(missing_ok=True)
            raise

    def discard(self) -> None:
        """Remove what was not published. A second call does nothing."""
        self._stack.close()


@contextmanager
def publishing(*paths: Path) -> Iterator[tuple[BinaryIO, ...]]:
    """Open a :class:`Publication` of ``paths``: published when the block has ended, and discarded after an error."""
    publication = Publication(*paths)
    try:
        yield publication.files
        publication.publish()
    finally:
        publication.discard()


@contextmanager
def _hidden(path: Path) -> Iterator[BinaryIO]:
    """A temporary file beside ``path``, removed at the end if it still has its own name."""
    for left in path.parent.glob(f"{_BEFORE}*.tmp"):
        name = left.name.removeprefix(_BEFORE)
        if name.startswith(path.name) and _BEHIND.fullmatch(name[len(path.name) :]):
            _remove_if_left(left)
    with _created(path) as file:
        try:
            yield file
        finally:
            Path(file.name).unlink(missing_ok=True)


def _created(path: Path) -> BinaryIO:
    """A new temporary file beside ``path``, locked."""
    while True:
        file = path.with_name(f"{_BEFORE}{path.name}.{secrets.token_hex(8)}.tmp").open("xb+")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # somebody took it for a killed writer's, before it was locked


def _remove_if_left(left: Path) -> None:
    """Remove the temporary file ``left`` unless its writer is alive."""
    with suppress(OSError), left.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        left.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Let the names in ``folder`` survive a power failure, where the file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
