"""Permissions that an earlier attempt was given for what no saved step shows yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_run.files.safe_folder import SafeFolder

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_run.config.request import Request
    from megatron_run.planning import ResolvedRun

#: The options that give a permission, as :class:`~megatron_run.config.request.Request` and ``run.json`` name them.
_OPTIONS = ("allow_change", "allow_plugin_change")


def permission_record(request: Request) -> dict[str, list[str]]:
    """Return what ``request`` allows, for the entry of its attempt in ``run.json``."""
    return {option: list(getattr(request, option)) for option in _OPTIONS}


def sound_permissions(entry: object) -> bool:
    """Whether an ``entry`` of ``run.json`` has the permissions that a run writes there, or none as early versions."""
    if not isinstance(entry, dict):
        return False
    names = [entry.get(option, []) for option in _OPTIONS]
    return type(entry.get("step", 0)) is int and all(
        isinstance(listed, list) and all(isinstance(name, str) for name in listed) for listed in names
    )


def with_granted(run: ResolvedRun, home: Path, step: int) -> ResolvedRun:
    """``run`` with what an attempt in ``home`` was allowed that went on from ``step`` or a later one.

    It may have been killed before it saved, and the same command then goes on. A step that it did save has the data,
    the words and the state that were allowed, so that nothing is granted from there on.
    """
    entries = [*_since(home, step)]
    given: dict[str, Any] = {
        option: tuple(
            dict.fromkeys((*getattr(run.request, option), *(name for each in entries for name in each[option])))
        )
        for option in _OPTIONS
    }
    return replace(run, request=replace(run.request, **given)) if entries else run


def _since(home: Path, step: int) -> Iterator[Mapping[str, Any]]:
    record = SafeFolder(home).read_json("run.json") or {}
    attempts = record.get("attempts")
    for entry in attempts if isinstance(attempts, list) else ():  # nobody has checked the file yet
        if sound_permissions(entry) and entry.get("step", -1) >= step:  # without a step it never began
            yield {option: entry.get(option, []) for option in _OPTIONS}
