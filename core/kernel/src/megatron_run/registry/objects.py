"""Plugins handed in from Python: a ready object, or anything with hooks, instead of an entry point."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

from megatron_run.contracts import PluginInfo
from megatron_run.errors import PluginError
from megatron_run.registry.difference import info_difference
from megatron_run.registry.digest import source_digest
from megatron_run.registry.load import only_kind, register
from megatron_run.registry.plugin import CONTRACTS, Plugin

#: What an object serves when it does not say: a schedule is asked for whatever topology is set, and refuses the rest.
_SERVES = {"schedule": frozenset({"parallel.pipeline", "parallel.chunks"})}


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
    info, factory = register(holder, only_kind(holder), name.rpartition(".")[2], "python", any_name=True)
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
