"""From an entry point, a file or a Python object to a plugin: register its hooks, check what it says of itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from megatron_run import hookspecs
from megatron_run.contracts.plugin import KINDS, PluginInfo, entry_point_group
from megatron_run.errors import PluginError, let_end
from megatron_run.errors.install_hint import check_engine
from megatron_run.registry.discover import SourceDigests, source_digest
from megatron_run.registry.loaded_plugin import (
    CONTRACTS,
    Plugin,
    factory_hook,
    hook_difference,
    in_one_line,
    info_difference,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron_run.registry.discover import Entry


#: The abilities of an object without a PluginInfo. A schedule refuses shapes itself, so it may be asked for any.
_SERVES = {"schedule": frozenset({"parallel.pipeline", "parallel.chunks"})}


def load(entry: Entry, origin: str, digests: SourceDigests | None = None) -> Plugin:
    """Import the plugin of ``entry`` and check it; ``origin`` says why it was chosen.

    Whoever loads several plugins hands in the same ``digests``, so that each package is read once. The kind of a single
    file may be left empty: it is that of its factory hook.

    Raises :class:`PluginError` naming plugin, distribution, version and what is wrong, with the whole cause chained;
    whatever the plugin raises while it is imported, ``SystemExit`` included, ends here, but what
    tells this process to end. Where a module of the engine is missing it is an
    :class:`~megatron_run.errors.EngineMissingError`.
    """
    try:
        holder, module = _file_as_plugin(entry.file) if entry.file else _import_installed(entry)
    except FileNotRunError:
        raise
    except BaseException as cause:
        let_end(cause)
        what = f"plugin {entry} of {entry.source} cannot be imported"
        check_engine(cause, what, origin)
        place = _own_line(cause, entry)
        fix = f"{f'correct {place}, ' if place else ''}choose another plugin, or see the whole cause with --debug"
        raise PluginError(what, why=in_one_line(cause), origin=origin, fix=fix) from cause
    try:
        kind = entry.kind or _only_kind(holder)
        info, factory = _register(holder, kind, entry.name, entry.source, any_name=entry.file is not None)
    except PluginError as error:
        error.origin = error.origin or origin
        raise
    return Plugin(
        kind=info.kind,
        name=entry.name,
        distribution=entry.distribution,
        version=entry.version,
        origin=origin,
        info=info,
        digest=(digests or SourceDigests()).of(module),
        location=getattr(module, "__file__", None) or entry.location,
        factory=factory,
        entry=entry,
    )


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


def from_object(candidate: object, origin: str = "python") -> Plugin:
    """A plugin made of ``candidate``: an instance of a contract, or a module (or object) that implements the hooks.

    An instance may say more about itself in an attribute ``info``, a PluginInfo; else it is named after its class, in
    lower case. Raises :class:`PluginError` when it is neither, or breaks its contract.
    """
    if isinstance(candidate, type):
        raise PluginError(f"{candidate.__name__} is a class", fix=f"hand in an object: {candidate.__name__}()")
    kind = next((kind for kind, contract in CONTRACTS.items() if isinstance(candidate, contract)), "")
    if not kind:
        return _from_hooks(candidate, origin)
    info = getattr(candidate, "info", None) or _default_info(candidate, kind)
    difference = info_difference(info, kind, getattr(info, "name", ""))
    if difference:
        raise PluginError(f"the plugin object {type(candidate).__name__} breaks its contract", why=f"info {difference}")
    return _plugin(info, origin, _module_of(type(candidate)), lambda **_arguments: candidate)


def _default_info(instance: object, kind: str) -> PluginInfo:
    return PluginInfo(kind, type(instance).__name__.lower(), provides=_SERVES.get(kind, frozenset()))


def _from_hooks(holder: object, origin: str) -> Plugin:
    module = holder if isinstance(holder, ModuleType) else _module_of(type(holder))
    name = module.__name__ if holder is module else type(holder).__name__.lower()
    info, factory = _register(holder, _only_kind(holder), name.rpartition(".")[2], "python", any_name=True)
    return _plugin(info, origin, module, factory)


def _module_of(cls: type) -> ModuleType:
    return sys.modules[cls.__module__]


def _plugin(info: PluginInfo, origin: str, module: ModuleType, factory: Callable[..., object]) -> Plugin:
    return Plugin(
        kind=info.kind,
        name=info.name,
        distribution="",
        version="",
        origin=origin,
        info=info,
        digest=source_digest(module),
        location=getattr(module, "__file__", None) or module.__name__,
        factory=factory,
    )


def _only_kind(holder: object) -> str:
    """The kind of which ``holder`` has the factory hook. Raises :class:`PluginError` unless it is exactly one."""
    kinds = [kind for kind in KINDS if hasattr(holder, factory_hook(kind))]
    if len(kinds) != 1:
        hooks = ", ".join(map(factory_hook, kinds)) or "no factory hook"
        name = getattr(holder, "__file__", None) or repr(holder)
        raise PluginError(
            f"{name} is no plugin",
            why=hook_difference(holder) or f"it has {hooks}",
            fix="implement megatron_run_plugin_info and the megatron_run_create_... hook of one kind",
        )
    return kinds[0]


def _register(
    holder: object, kind: str, name: str, source: str, *, any_name: bool = False
) -> tuple[PluginInfo, Callable[..., object]]:
    """Register the hooks of ``holder``, a module or an object like one; return its info and its factory.

    With ``any_name`` the plugin may call itself something else: the file's name wins. Raises :class:`PluginError`.
    """
    # A manager of its own: one plugin's hooks never answer for another's, a broken one leaves nothing pending for the
    # next, and a module may be loaded any number of times.
    manager = pluggy.PluginManager("megatron_run")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(holder, name=f"{kind}={name}")
        manager.check_pending()
    except pluggy.PluginValidationError as cause:
        raise _differs(kind, name, source, hook_difference(holder) or in_one_line(cause)) from cause
    for hook in ("megatron_run_plugin_info", factory_hook(kind)):
        if not getattr(manager.hook, hook).get_hookimpls():
            raise _differs(kind, name, source, _missing(holder, hook))
    info = _ask_info(manager, kind, name, source)
    if any_name and isinstance(getattr(info, "name", None), str):
        info = replace(info, name=name)
    difference = info_difference(info, kind, name)
    if difference:
        raise _differs(kind, name, source, f"megatron_run_plugin_info {difference}")
    return info, getattr(manager.hook, factory_hook(kind))


def _ask_info(manager: pluggy.PluginManager, kind: str, name: str, source: str) -> Any:
    try:
        return manager.hook.megatron_run_plugin_info()
    except BaseException as cause:
        let_end(cause)
        why = f"megatron_run_plugin_info failed: {in_one_line(cause)}"
        raise _differs(kind, name, source, why) from cause


def _differs(kind: str, name: str, source: str, difference: str) -> PluginError:
    return PluginError(
        f"plugin {kind}={name} of {source} breaks its contract",
        why=difference,
        fix=f"choose another {kind}, or correct this one",
    )


def _missing(holder: object, hook: str) -> str:
    if callable(getattr(holder, hook, None)):
        return f"{hook} is not marked @hookimpl"
    return f"it has no {hook}"


def _import_installed(entry: Entry) -> tuple[object, ModuleType]:
    """The object that the entry point refers to (a module, or an attribute of one), and the module."""
    point = EntryPoint(entry.name, entry.value, entry_point_group(entry.kind))
    return point.load(), sys.modules[point.module]


def _file_as_plugin(path: Path) -> tuple[object, ModuleType]:
    module = import_file(path)
    return module, module


class FileNotRunError(PluginError):
    """A configuration names a Python file, and who reads it wants none to be run."""


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

    It may import its neighbours, which hide no module that is installed: their folder comes last in the search.
    Every file that a configuration names is run here, and not within :func:`no_files_run`.
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
