"""The hooks of a module, registered; and in words how they differ from those that are asked for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from traceback import extract_tb

import pluggy

from megatron_run import hookspecs
from megatron_run.errors import PluginError
from megatron_run.errors.wording import did_you_mean


def registered(holder: object, name: str) -> pluggy.PluginManager:
    """A manager of the hooks of ``holder`` alone. Raises :class:`PluginError` that says how they differ.

    A manager of its own: one plugin's hooks never answer for another's, a broken one leaves nothing pending for the
    next, and a module may be loaded any number of times.
    """
    manager = pluggy.PluginManager("megatron_run")
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(holder, name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as cause:
        raise PluginError(hook_difference(holder) or in_one_line(cause)) from cause
    return manager


def missing_hook(holder: object, hook: str) -> str:
    """Why ``holder`` does not implement ``hook``."""
    if callable(getattr(holder, hook, None)):
        return f"{hook} is not marked @hookimpl"
    return f"it has no {hook}"


def in_one_line(cause: BaseException, *, where: bool = False) -> str:
    """An exception of a plugin as part of a message: ``ValueError: what it says``; ``where``: also who raised it."""
    last = extract_tb(cause.__traceback__)[-1:] if where else ()
    place = "".join(f" ({Path(each.filename).name}, line {each.lineno})" for each in last)
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}{place}"


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


def _implementations(holder: object) -> Iterator[tuple[str, object]]:
    """Everything that ``holder`` marks with ``@hookimpl``, under the name of the hook it implements."""
    for attribute in dir(holder):
        member = getattr(holder, attribute, None)
        marked = getattr(member, "megatron_run_impl", None)  # set by pluggy.HookimplMarker("megatron_run")
        if isinstance(marked, dict):
            yield marked.get("specname") or attribute, member


def _arguments(function: object) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters) if callable(function) else ()
