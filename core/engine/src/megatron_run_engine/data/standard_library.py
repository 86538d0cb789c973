"""The text that every machine with Python has: the sources of the running Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from megatron_run.errors import DataError
from megatron_run_engine.data.documents import Document, text_files

#: Folders left out: what others installed, tests, applications, generated tables, and what newer Pythons dropped.
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "tkinter", "encodings", "pydoc_data"}
    | {"ensurepip", "lib2to3", "distutils"}
)


def standard_library() -> tuple[Document, ...]:
    """The ``*.py`` files of the standard library, sorted: some 9 MB that depend on nothing but the Python's version.

    Raises :class:`DataError` when this Python carries no sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = text_files(folder, without=LEFT_OUT)
    documents = tuple(Document(path) for path in files if _belongs(path.relative_to(folder)))
    if documents:
        return documents
    raise DataError(f"{folder} holds no Python sources", why="data.paths is empty", fix="set data.paths to your texts")


def _belongs(path: Path) -> bool:
    """Whether a file of the library is code that people wrote; the build writes ``_sysconfigdata`` and ``config-*``."""
    return path.suffix == ".py" and not path.parts[0].startswith(("_sysconfigdata", "config-"))
