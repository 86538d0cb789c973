"""Imports what an entry point or a path names, and tells in a line why that failed. Nothing heavy of ours is needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING

from megatron_run.contracts.plugin import entry_point_group
from megatron_run.errors import PluginError, let_end
from megatron_run.errors.install_hint import check_engine
from megatron_run.errors.machine_limits import system_limit
from megatron_run.registry.hooks import in_one_line

if TYPE_CHECKING:
    from megatron_run.registry.discover import Entry


def import_entry(entry: Entry, what: str, origin: str, instead: str) -> tuple[object, ModuleType]:
    """The object that ``entry`` refers to, a module or an attribute of one, and the module.

    Raises :class:`PluginError` with ``what``, whatever the module raises, and as its fix the line to correct and what
    to do ``instead``; :class:`~megatron_run.errors.EngineMissingError`; and what :func:`system_limit` tells.
    """
    try:
        return _file_as_plugin(entry.file) if entry.file else _import_installed(entry)
    except FileNotRunError:
        raise
    except BaseException as cause:
        let_end(cause)
        if limit := system_limit(cause):
            raise limit from cause
        check_engine(cause, what, origin)
        place = _own_line(cause, entry)
        fix = f"{f'correct {place}, ' if place else ''}{instead}, or see the whole cause with --debug"
        raise PluginError(what, why=in_one_line(cause), origin=origin, fix=fix) from cause


def _own_line(cause: BaseException, entry: Entry) -> str:
    """The last line of the plugin's own that led to ``cause``, ``line 3 of ./mine.py``; empty where there is none."""
    places = [(frame.filename, frame.lineno) for frame in extract_tb(cause.__traceback__)]
    if isinstance(cause, SyntaxError) and cause.filename:
        places.append((cause.filename, cause.lineno))
    package = entry.value.replace(":", ".").partition(".")[0]

    def own(file: Path) -> bool:
        if entry.file:
            return file.absolute().parent == entry.file.absolute().parent
        return package in (*file.parts, file.stem)

    return next((f"line {line} of {file}" for file, line in reversed(places) if own(Path(file))), "")


def _import_installed(entry: Entry) -> tuple[object, ModuleType]:
    """The object that the entry point refers to (a module, or an attribute of one), and the module."""
    point = EntryPoint(entry.name, entry.value, entry_point_group(entry.kind))
    return point.load(), sys.modules[point.module]


def _file_as_plugin(path: Path) -> tuple[object, ModuleType]:
    module = import_file(path)
    return module, module


class FileNotRunError(PluginError):
    """A configuration names a Python file, and who reads it wants none to be run."""


#: No argument: a plugin's validators, which pydantic calls, import files too (``optimizer.rule``).
_RUN: ContextVar[bool] = ContextVar("files_are_run", default=True)


@contextmanager
def no_files_run() -> Iterator[None]:
    """Within the block, in this thread, :func:`import_file` raises :class:`FileNotRunError` and runs nothing."""
    before = _RUN.set(False)
    try:
        yield
    finally:
        _RUN.reset(before)


def import_file(path: Path) -> ModuleType:
    """Run the file as a module of its own name, so that two files of one name do not collide.

    It may import its neighbours, which hide no module that is installed: their folder comes last in the search. There
    it stays, since a function of the file may import one later. Every file that a configuration names is run here, and
    not within :func:`no_files_run`.
    """
    if not _RUN.get():
        raise FileNotRunError(f"the file {path} is not run", why="this command reads a configuration and runs nothing")
    source = path.read_bytes()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"megatron_run_file_{sha256(str(path).encode()).hexdigest()[:8]}_{path.stem}"
    loader = SourceFileLoader(name, str(path))
    spec = spec_from_loader(name, loader)
    if spec is None:
        raise ImportError(f"{path} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[name] = module  # pydantic and dataclasses look up annotations there
    try:
        exec(loader.source_to_code(source, str(path)), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module
