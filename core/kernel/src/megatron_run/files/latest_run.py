"""``runs/latest``, a word for the newest run beside it of those that their users did not name.

It is a file with that run's name, and no link: what reads all of ``runs`` and follows links, as TensorBoard does, would
find that run twice. Whoever takes a run's folder from a user asks :func:`follow_latest`; early versions made links.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from megatron_run.files.foreign_file import read_file
from megatron_run.files.safe_folder import SafeFolder

#: The name of the file.
LATEST_RUN = "latest"
#: The run that a command takes where none is named.
DEFAULT_RUN = Path("runs", LATEST_RUN)
#: What a run that its user did not name is called: date, time and a random part.
_UNNAMED = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")


def is_unnamed(folder: Path) -> bool:
    """Whether the run in ``folder`` was named by its start."""
    return _UNNAMED.fullmatch(folder.name) is not None


def follow_latest(path: Path, known: MutableMapping[str, str] | None = None) -> Path:
    """``path`` with the folder of a run, which need not be there, in the place of a file ``latest`` that names it.

    ``known`` has the run that such a file named when it was first read, by the file as it was written; a file that is
    not there yet is added. It is not read again: another run may have begun meanwhile.
    """
    known = {} if known is None else known
    for place in (path, *path.parents):
        if place.name == LATEST_RUN and (name := known.get(str(place)) or _named_by(place)):
            known[str(place)] = name
            return place.parent / name / path.relative_to(place)
    return path


def point_latest_at(run: Path) -> None:
    """Let ``latest`` name ``run``, a folder beside it, unless something else lies there or nothing can be written."""
    file = run.parent / LATEST_RUN
    early = file.is_symlink() and _UNNAMED.fullmatch(file.readlink().name) is not None
    with suppress(OSError):
        if early:
            SafeFolder(file.parent).remove(file.name)
        if early or _named_by(file) or not file.exists():
            SafeFolder(file.parent).replace(file.name, f"{run.name}\n".encode())


def _named_by(file: Path) -> str:
    """The run that ``file`` names; empty for what is no such file."""
    try:
        text = read_file(file, 64).decode("ascii").strip()
    except (OSError, ValueError):
        return ""
    return text if _UNNAMED.fullmatch(text) else ""
