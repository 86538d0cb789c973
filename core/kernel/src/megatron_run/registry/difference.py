"""How a plugin breaks its contract, in words: unknown hooks, wrong arguments, wrong fields of its PluginInfo."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from megatron_run import hookspecs
from megatron_run.contracts.plugin import KINDS, RUN_KINDS, PluginInfo
from megatron_run.errors import did_you_mean

#: Fields of PluginInfo and the type each must have.
_INFO_TYPES: Mapping[str, type] = {
    "kind": str,
    "name": str,
    "api": int,
    "provides": frozenset,
    "requires": frozenset,
    "conflicts": frozenset,
    "suggests": Mapping,
    "suggests_with": Mapping,
    "state_version": int,
}

#: Optional fields of PluginInfo that are functions of two arguments: what the first argument is.
_CHECKS: Mapping[str, str] = {"check_config": "the configuration", "check_device": "the device"}


def in_one_line(cause: BaseException) -> str:
    """An exception of a plugin as part of a message: ``ValueError: what it says``."""
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


def said_type(value: object) -> str:
    """The type of an unexpected value: ``None``, or ``an object of type int``."""
    return "None" if value is None else f"an object of type {type(value).__name__}"


def hook_difference(holder: object) -> str:
    """The first hook of ``holder`` that is unknown, or asks for an argument that its hook does not have."""
    known = {name: _arguments(spec) for name, spec in vars(hookspecs).items() if name.startswith("megatron_run_")}
    for name, implementation in _implementations(holder):
        if name not in known:
            return f"unknown hook {name}; {did_you_mean(name, known) or 'the hooks are ' + ', '.join(sorted(known))}"
        extra = [argument for argument in _arguments(implementation) if argument not in known[name]]
        if extra:
            has = ", ".join(known[name]) or "no arguments"
            return f"{name} has no argument {extra[0]!r}; it has {has}"
    return ""


def info_difference(info: object, kind: str, name: str) -> str:
    """How the answer to ``megatron_run_plugin_info`` is wrong for ``kind=name``, or an empty string."""
    if not isinstance(info, PluginInfo):
        return f"returned {said_type(info)}, and must return a megatron_run.PluginInfo"
    for field, wanted in _INFO_TYPES.items():
        if not isinstance(getattr(info, field), wanted):
            return f"says {field}={getattr(info, field)!r}, which must be a {wanted.__name__}"
    for field, given in _CHECKS.items():
        check = getattr(info, field)
        if check is not None and not _takes_two(check):
            return f"says {field}={check!r}, which must be a function of {given} and the options, or None"
    if (info.kind, info.name) != (kind, name):
        return f"says {info.kind}={info.name}, and it was chosen as {kind}={name}"
    if info.api > KINDS[kind]:
        return f"says api={info.api}, and this kernel knows {kind} up to api={KINDS[kind]}: a newer kernel is needed"
    if kind not in RUN_KINDS and info.options is not None:
        return f"says options={info.options!r}, and a {kind} has none: nothing could set them"
    return _options_difference(info.options)


def _options_difference(options: object) -> str:
    if options is None:
        return ""
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        return f"says options={options!r}, which must be a pydantic BaseModel class"
    if not options.model_config.get("frozen") or options.model_config.get("extra") != "forbid":
        return f'says options={options.__name__}, which must set ConfigDict(frozen=True, extra="forbid")'
    return ""


def _implementations(holder: object) -> Iterator[tuple[str, object]]:
    """Everything that ``holder`` marks with ``@hookimpl``, under the name of the hook it implements."""
    for attribute in dir(holder):
        member = getattr(holder, attribute, None)
        marked = getattr(member, "megatron_run_impl", None)  # set by pluggy.HookimplMarker("megatron_run")
        if isinstance(marked, dict):
            yield marked.get("specname") or attribute, member


def _arguments(function: object) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters) if callable(function) else ()


def _takes_two(function: object) -> bool:
    try:
        inspect.signature(function).bind(None, None)  # type: ignore[arg-type]  # what is no function raises
    except (TypeError, ValueError):
        return False
    return True
