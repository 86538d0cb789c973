"""Finds the documents that a user names: files, folders and patterns, in an order that no file system decides."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path

from megatron_run.errors import DataError, did_you_mean

#: Bytes of a file that are searched for NUL. A NUL marks a binary file, as it does for grep and git.
_PROBE = 8192


@dataclass(frozen=True)
class Document:
    """One file of text."""

    path: Path

    def read(self) -> bytes:
        """Return its bytes. Raises :class:`DataError` if it cannot be read."""
        try:
            return self.path.read_bytes()
        except OSError as cause:
            raise _unreadable(self.path, cause) from cause


def find_documents(names: Sequence[str]) -> tuple[Document, ...]:
    """Return the documents of ``names`` in the order of the names, sorted within each name, each file once.

    A name is a file, a pattern (``src/**/*.py``), or a folder, which stands for all text files beneath it except empty
    and hidden ones. Raises :class:`DataError` if a name matches nothing.
    """
    found: dict[Path, Document] = {}
    for name in names:
        for path in _files(name):
            found.setdefault(path.resolve(), Document(path))
    return tuple(found.values())


def _files(name: str) -> Sequence[Path]:
    path = Path(os.path.expanduser(name))  # noqa: PTH111  # Path.expanduser raises for a user that does not exist
    if path.is_dir():
        return _at_least_one(text_files(path), f"folder {path} holds no text file")
    if path.is_file():
        if not path.stat().st_size:
            raise DataError(f"data file {path} is empty", origin="data.paths")
        return [path]
    if has_magic(name):
        matches = sorted(Path(match) for match in glob(str(path), recursive=True))  # noqa: PTH207  # absolute too
        return _at_least_one([match for match in matches if _holds_text(match)], f"{name} matches no text file")
    raise _missing(path)


def _at_least_one(paths: Sequence[Path], otherwise: str) -> Sequence[Path]:
    if not paths:
        raise DataError(otherwise, origin="data.paths", fix="name files, folders or patterns such as 'src/**/*.py'")
    return paths


def _missing(path: Path) -> DataError:
    if path.exists():
        return DataError(f"{path} is neither a file nor a folder", origin="data.paths")
    neighbours = sorted(os.listdir(path.parent)) if path.parent.is_dir() else []  # noqa: PTH208  # names are enough
    return DataError(f"data file {path} does not exist", origin="data.paths", fix=did_you_mean(path.name, neighbours))


def text_files(folder: Path, without: frozenset[str] = frozenset()) -> list[Path]:
    """Return the text files beneath ``folder`` that are neither empty nor hidden, sorted by the parts of their path.

    Folders named in ``without`` are skipped. Raises :class:`DataError` if a folder or file cannot be read.
    """
    return sorted((path for path in _walk(folder, without) if _holds_text(path)), key=lambda path: path.parts)


def _walk(folder: Path, without: frozenset[str]) -> Iterator[Path]:
    without |= {"__pycache__"}

    def fail(cause: OSError) -> None:
        raise _unreadable(Path(cause.filename), cause) from cause

    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        yield from (Path(parent, name) for name in files if not name.startswith("."))


def _holds_text(path: Path) -> bool:
    """Whether ``path`` is a file that is not empty and has no NUL byte near its start."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            start = file.read(_PROBE)
    except OSError as cause:
        raise _unreadable(path, cause) from cause
    return bool(start) and b"\0" not in start


def _unreadable(path: Path, cause: OSError) -> DataError:
    return DataError(f"{path} cannot be read", why=cause.strerror or str(cause), origin="data.paths")


#: Skipped folders: installed packages, tests, applications, generated tables, and modules that newer Pythons dropped.
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "tkinter", "encodings", "pydoc_data"}
    | {"ensurepip", "lib2to3", "distutils"}
)


def standard_library() -> tuple[Document, ...]:
    """Return the ``*.py`` files of the standard library, sorted: some 9 MB that depend only on the Python version.

    Raises :class:`DataError` if this Python has no sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = text_files(folder, without=LEFT_OUT)
    documents = tuple(Document(path) for path in files if _belongs(path.relative_to(folder)))
    if documents:
        return documents
    raise DataError(f"{folder} holds no Python sources", why="data.paths is empty", fix="set data.paths to your texts")


def _belongs(path: Path) -> bool:
    """Whether a file of the library was written by people. The build generates ``_sysconfigdata`` and ``config-*``."""
    return path.suffix == ".py" and not path.parts[0].startswith(("_sysconfigdata", "config-"))
