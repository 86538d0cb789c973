"""Values that keys of a configuration may have, as far as a completion says it: learned once, kept in the user's cache.

Asking every plugin for its options imports torch, which takes seconds; a completion has a fraction of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_run import __version__
from megatron_run.contracts.plugin import RUN_KINDS
from megatron_run.files.safe_folder import SafeFolder
from megatron_run.registry.discover import Catalog, Entry

if TYPE_CHECKING:
    from megatron_run_cli.reports.keys import KeyInfo

_NAME = "keys.json"


class KeyHelp(NamedTuple):
    """A key or an option: its type in words, the values that it may have where they are few, its meaning.

    ``files``: its values are files or folders.
    """

    type: str
    choices: tuple[str, ...]
    meaning: str
    files: bool


class Vocabulary(NamedTuple):
    """``keys`` of the kernel by name, and the ``options`` of each plugin, written ``kind=name``, by theirs."""

    keys: Mapping[str, KeyHelp]
    options: Mapping[str, Mapping[str, KeyHelp]]


def learned(catalog: Catalog) -> Vocabulary:
    """Vocabulary learned of plugins that are installed as they were then; else the keys of the kernel alone."""
    kept = _read()
    if kept is None:
        return Vocabulary(_helps(_kernel_keys()), {})
    marks = _marks(catalog)
    return Vocabulary(kept.keys, {name: options for name, (mark, options) in kept.plugins.items() if mark in marks})


def learn(catalog: Catalog) -> bool:
    """Ask every plugin for its options, in a child process; whether it was done: without the engine it is not.

    What was learned before is no reason not to: a plugin in a folder of its author's gets options and keeps its
    version. Raises :class:`OSError` where the cache cannot be written.
    """
    file = _file()
    if file is None:
        return False
    from megatron_run.files.user_cache import keep
    from megatron_run_cli.reports.keys import Description
    from megatron_run_cli.reports.probe import probe

    plugins = {}
    for each in probe([entry for entry in catalog.entries if entry.kind in RUN_KINDS], refusals=False):
        if each.description is not None:
            options = Description.from_json(each.description).options
            plugins[str(each.entry)] = (_mark(each.entry), _rows(options))
    content = {"version": __version__, "keys": _kernel_keys(), "plugins": plugins}
    keep(file, json.dumps(content).encode())
    return True


def _file() -> Path | None:
    """Where the words are kept; None without a cache, or without the engine, which has it."""
    try:
        from megatron_run.files.user_cache import cached
    except ModuleNotFoundError:
        return None
    return cached("completion", _NAME)


class _Kept(NamedTuple):
    """The content of the file: keys of the kernel, and of each plugin its mark and its options."""

    keys: Mapping[str, KeyHelp]
    plugins: Mapping[str, tuple[str, Mapping[str, KeyHelp]]]


def _read() -> _Kept | None:
    """The words that this version has kept; None for none, and for a file that is damaged."""
    file = _file()
    content = None if file is None else SafeFolder(file.parent).read_json(file.name)
    if content is None or content.get("version") != __version__:
        return None
    try:
        plugins = {name: (str(mark), _helps(rows)) for name, (mark, rows) in content["plugins"].items()}
        return _Kept(_helps(content["keys"]), plugins)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _marks(catalog: Catalog) -> set[str]:
    return {_mark(entry) for entry in catalog.entries if entry.kind in RUN_KINDS}


def _mark(entry: Entry) -> str:
    """The traits that change with a plugin: where it comes from, and its version."""
    return " ".join((str(entry), entry.value, entry.distribution, entry.version, entry.location))


def _kernel_keys() -> dict[str, KeyHelp]:
    from megatron_run_cli.reports.keys import kernel_keys

    return _rows(kernel_keys())


def _rows(keys: Iterable[KeyInfo]) -> dict[str, KeyHelp]:
    return {key.name: KeyHelp(key.type, key.choices, key.description, key.files) for key in keys}


def _helps(rows: Mapping[str, Any]) -> dict[str, KeyHelp]:
    """The help of keys as JSON has it, or as it is. Raises :class:`TypeError` or ValueError for anything else."""
    found = {
        name: KeyHelp(kind, tuple(choices), meaning, files is True)
        for name, (kind, choices, meaning, files) in rows.items()
    }
    if not all(isinstance(text, str) for each in found.values() for text in (each.type, *each.choices, each.meaning)):
        raise TypeError("a type, a choice or a meaning is no text")
    return found
