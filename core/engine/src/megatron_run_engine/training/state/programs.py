"""The files of code that a configuration names, by their hashes: whoever goes on with a step learns of a change."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_run.registry.choose import is_file

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.checkpoint.manifest import About


def programs(run: ResolvedRun) -> dict[str, str]:
    """The SHA-256 of each file, by what it is to ``run``: ``optimizer.rule``, ``schedule``."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(_contents(run))}


def _contents(run: ResolvedRun) -> Iterator[tuple[str, bytes]]:
    places = [
        (kind, plugin.entry.file)
        for kind, chosen in run.plugins.items()
        for plugin in chosen
        if plugin.entry is not None and plugin.entry.file is not None
    ]
    rule = str(run.config.optimizer.options.get("rule", "")).rpartition(":")[0]
    if is_file(rule):
        places.append(("optimizer.rule", Path(rule).expanduser()))
    for name, path in places:
        with suppress(OSError):  # it is gone since it was imported
            yield name, path.read_bytes()


def program_changes(saved: About, run: ResolvedRun) -> list[str]:
    """A line for each file that is not as it was when the step was saved, where that is known."""
    return [
        f"{name} is a file that has changed since step {saved.step} was saved"
        for name, sha256 in programs(run).items()
        if saved.programs.get(name, sha256) != sha256
    ]
