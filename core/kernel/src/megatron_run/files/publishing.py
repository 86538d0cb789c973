"""Files and folders that a command makes for its user: all of them appear whole, or none does, however it ends."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import reduce
from operator import and_
from pathlib import Path
from typing import BinaryIO

from megatron_run.files.temporary_names import lock_new, remove_left, temporary_name, writer_was_killed

_FOLDER = os.O_RDONLY | os.O_DIRECTORY


class Publication:
    """Temporary files beside ``paths``, in :attr:`files`, which :meth:`publish` gives their names.

    Until then whoever reads sees what was there before. What a killed writer of the same ``paths`` has left is removed;
    the lock of a temporary file says that its writer is alive. A path may lead over links, as in a shell. All get one
    mode: what each of ``paths`` allows that is there. Without ``durable`` a power failure may leave less than all: for
    what can be made again. Raises OSError, at once for a path that is a folder or a device.
    """

    def __init__(self, *paths: Path, durable: bool = True) -> None:
        self._durable = durable
        self._paths = tuple(Path(os.path.realpath(path)) for path in paths)
        for path in self._paths:
            if path.exists() and not path.is_file():  # a file in the place of /dev/null would be a catastrophe
                raise OSError(errno.EINVAL, "it is there, and not a file", str(path))
        mode = _common_mode(self._paths)
        with ExitStack() as stack:
            #: A file for each path, to be written.
            self.files: tuple[BinaryIO, ...] = tuple(stack.enter_context(_hidden(path, mode)) for path in self._paths)
            self._stack = stack.pop_all()

    def publish(self) -> None:
        """Put the files on the disk, and then give them their names.

        Of several, the old file of the last name goes first and the new one comes last: where it is, all belong
        together. On an error names that were given are taken back, and the last file is the old one again.
        """
        try:
            for file in self.files:
                file.flush()
                if self._durable:
                    os.fsync(file.fileno())
            self._name()
        finally:
            self.discard()
        for folder in {path.parent for path in self._paths} if self._durable else ():
            _sync(folder)

    def _name(self) -> None:
        last = self._paths[-1]
        old = last.with_name(temporary_name(last.name))
        made: list[Path] = []
        try:
            if len(self._paths) > 1 and last.exists():
                last.rename(old)
            for file, path in zip(self.files, self._paths, strict=True):
                new = not path.exists()
                Path(file.name).replace(path)
                if new:
                    made.append(path)
        except BaseException:  # a signal too
            for path in made:
                path.unlink(missing_ok=True)
            if old.exists():
                old.replace(last)
            raise
        old.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what was not published. A second call does nothing."""
        self._stack.close()


def half_named(*paths: Path) -> frozenset[Path]:
    """Those of ``paths`` that a writer named which was killed before it named the last.

    Its temporary file of the last is there, and that of a named one is not: whoever was killed earlier has both.
    """
    *others, last = (Path(os.path.realpath(path)) for path in paths)
    if last.exists() or _writer_was_killed(last) is not True:
        return frozenset()
    return frozenset(path for path, place in zip(paths, others, strict=False) if _writer_was_killed(place) is None)


def _writer_was_killed(path: Path) -> bool | None:
    if not path.parent.is_dir():
        return None
    with _opened(path.parent) as folder:
        return writer_was_killed(path.name, folder)


@contextmanager
def publishing(*paths: Path, durable: bool = True) -> Iterator[tuple[BinaryIO, ...]]:
    """Open a :class:`Publication` of ``paths``: published when the block has ended, and discarded after an error."""
    publication = Publication(*paths, durable=durable)
    try:
        yield publication.files
        publication.publish()
    except OSError as error:  # a write to a descriptor does not know the path
        error.filename = error.filename or str(paths[0])
        raise
    finally:
        publication.discard()


@contextmanager
def publishing_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder``, to be filled: it gets that name when the block has ended.

    After an error it goes. Missing parents are made. What a killed writer of the same ``folder`` has left is removed.
    Raises OSError, and FileExistsError where anything has the name.
    """
    _require_new(folder)
    with _parents(folder), _hidden_folder(folder) as hidden:
        yield hidden
        for path in hidden.rglob("*"):
            if path.is_file() and not path.is_symlink():
                _flush(path)
        for path in (hidden, *(path for path in hidden.rglob("*") if path.is_dir())):
            _sync(path)
        _require_new(folder)
        hidden.rename(folder)
    _sync(folder.parent)


def _require_new(folder: Path) -> None:
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))


@contextmanager
def _parents(folder: Path) -> Iterator[None]:
    """Make the missing parents of ``folder``, and remove them again when the block fails."""
    made: list[Path] = []
    try:
        for path in reversed([path for path in folder.parents if not path.exists()]):
            path.mkdir()
            made.append(path)
        yield
    except BaseException:
        for path in reversed(made):
            with suppress(OSError):  # another program has put something into it
                path.rmdir()
        raise


def _common_mode(paths: Iterable[Path]) -> int | None:
    """The mode that all of ``paths`` allow that are there; None where none is, and the umask decides."""
    modes = [stat.S_IMODE(path.stat().st_mode) for path in paths if path.exists()]
    return reduce(and_, modes) if modes else None


@contextmanager
def _hidden(path: Path, mode: int | None) -> Iterator[BinaryIO]:
    """A temporary file of ``mode`` beside ``path``, removed at the end if it still has its own name."""
    _remove_left(path)
    with _created(path, mode) as file:
        try:
            yield file
        finally:
            Path(file.name).unlink(missing_ok=True)


def _created(path: Path, mode: int | None) -> BinaryIO:
    """A new temporary file beside ``path``, locked."""
    while True:
        file = path.with_name(temporary_name(path.name)).open("xb+")
        if lock_new(file.fileno()):
            if mode is not None:
                with suppress(OSError):  # a file system without modes
                    os.fchmod(file.fileno(), mode)
            return file
        file.close()


@contextmanager
def _hidden_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path``, locked, and removed at the end if it still has its own name."""
    _remove_left(path)
    while True:
        hidden = path.with_name(temporary_name(path.name))
        hidden.mkdir()
        handle = os.open(hidden, _FOLDER)
        try:
            if lock_new(handle):
                yield hidden
                return
        finally:
            os.close(handle)
            shutil.rmtree(hidden, ignore_errors=True)


def _remove_left(path: Path) -> None:
    with _opened(path.parent) as folder:
        remove_left(path.name, folder)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, _FOLDER)
    try:
        yield handle
    finally:
        os.close(handle)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync(folder: Path) -> None:
    """Let the names in ``folder`` survive a power failure, where the file system can."""
    with suppress(OSError):
        _flush(folder)
