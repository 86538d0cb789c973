"""From an entry point, a file or a Python object to a plugin: register its hooks, check what it says of itself."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from megatron_run.contracts.plugin import KINDS, PluginInfo
from megatron_run.errors import PluginError, let_end
from megatron_run.registry.discover import SourceDigests, source_digest
from megatron_run.registry.hooks import hook_difference, in_one_line, missing_hook, registered
from megatron_run.registry.importing import import_entry
from megatron_run.registry.loaded_plugin import CONTRACTS, Plugin, factory_hook, info_difference

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
    what = f"plugin {entry} of {entry.source} cannot be imported"
    holder, module = import_entry(entry, what, origin, "choose another plugin")
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


def from_object(candidate: object) -> Plugin:
    """A plugin made of ``candidate``: an instance of a contract, or a module (or object) that implements the hooks.

    An instance may say more about itself in an attribute ``info``, a PluginInfo; else it is named after its class, in
    lower case. Raises :class:`PluginError` when it is neither, or breaks its contract.
    """
    if isinstance(candidate, type):
        raise PluginError(f"{candidate.__name__} is a class", fix=f"hand in an object: {candidate.__name__}()")
    kind = next((kind for kind, contract in CONTRACTS.items() if isinstance(candidate, contract)), "")
    if not kind:
        return _from_hooks(candidate)
    info = getattr(candidate, "info", None) or _default_info(candidate, kind)
    difference = info_difference(info, kind, getattr(info, "name", ""))
    if difference:
        raise PluginError(f"the plugin object {type(candidate).__name__} breaks its contract", why=f"info {difference}")
    return _plugin(info, _module_of(type(candidate)), lambda **_arguments: candidate)


def _default_info(instance: object, kind: str) -> PluginInfo:
    return PluginInfo(kind, type(instance).__name__.lower(), provides=_SERVES.get(kind, frozenset()))


def _from_hooks(holder: object) -> Plugin:
    module = holder if isinstance(holder, ModuleType) else _module_of(type(holder))
    name = module.__name__ if holder is module else type(holder).__name__.lower()
    info, factory = _register(holder, _only_kind(holder), name.rpartition(".")[2], "python", any_name=True)
    return _plugin(info, module, factory)


def _module_of(cls: type) -> ModuleType:
    return sys.modules[cls.__module__]


def _plugin(info: PluginInfo, module: ModuleType, factory: Callable[..., object]) -> Plugin:
    return Plugin(
        kind=info.kind,
        name=info.name,
        distribution="",
        version="",
        origin="python",
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
    try:
        manager = registered(holder, f"{kind}={name}")
    except PluginError as cause:
        raise _differs(kind, name, source, cause.what) from cause
    for hook in ("megatron_run_plugin_info", factory_hook(kind)):
        if not getattr(manager.hook, hook).get_hookimpls():
            raise _differs(kind, name, source, missing_hook(holder, hook))
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
