"""What the ranks must agree on before they train together. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_run.errors import InputError, PluginError

_SHA256 = re.compile("[0-9a-f]{64}")


def check_digests(notes: Sequence[Mapping[str, Any]], recall: Callable[[str], Mapping[str, str]]) -> None:
    """Raise :class:`PluginError` with a table of what differs between ranks and on which hosts.

    Each note has ``host`` and ``digest``, the name under which ``recall`` finds a flat table of texts that must agree;
    the same name is the same table. Nothing is recalled while all agree.
    """
    names = {note["digest"] for note in notes}
    if len(names) < 2:
        return
    tables = {name: recall(name) for name in names}
    everybody = [(note["host"], tables[note["digest"]]) for note in notes]
    keys = sorted({key for table in tables.values() for key in table})
    differing = [key for key in keys if len({table.get(key) for table in tables.values()}) > 1]
    rows = "".join(f"\n  {_row(key, everybody)}" for key in differing)
    raise PluginError(
        "the ranks do not run the same thing",
        why=f"{len(differing)} {'entries differ' if len(differing) > 1 else 'entry differs'}",
        fix=f"install the same versions and pass the same arguments on every host{rows}",
    )


def _row(key: str, everybody: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """The values of ``key``, each with the ranks and hosts that have it; a SHA-256 is cut short."""
    holders: dict[str, list[str]] = {}
    for rank, (host, table) in enumerate(everybody):
        value = table.get(key, "nothing")
        value = value[:12] if _SHA256.fullmatch(value) else value
        holders.setdefault(value, []).append(f"{rank} ({host})")
    return f"{key}: " + ", ".join(f"{value} on rank {', '.join(ranks)}" for value, ranks in holders.items())


def check_gpus(notes: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`InputError` when two ranks have the same ``gpu``, a name unique in the world, empty on the CPU.

    A rank that sees one GPU cannot know whether it is its own or the only one of the host.
    """
    holders: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        if note["gpu"]:
            holders.setdefault(note["gpu"], []).append(rank)
    shared = next((ranks for ranks in holders.values() if len(ranks) > 1), None)
    if shared is not None:
        raise InputError(
            f"rank {', '.join(map(str, shared))} would train on the same GPU of {notes[shared[0]]['host']}",
            why="each sees only this one",
            fix="start one rank for each GPU or set run.device=cpu",
        )
