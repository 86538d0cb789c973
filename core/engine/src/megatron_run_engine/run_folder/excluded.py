"""The ranks that a run leaves out at each start: ``excluded.json`` in its folder (``guard.exclude``).

A rank is known by its host and its *place* there, its local number in full strength, which chooses its GPU. The record
outlives attempts: who takes an entry out, or removes the file, takes the rank back. A scheduler reads the hosts in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.errors import CheckpointError, InputError
from megatron_run.files.safe_folder import SafeFolder, parse_json

if TYPE_CHECKING:
    from megatron_run_engine.run_folder.folder import RunFolder

#: The record in the run folder.
NAME = "excluded.json"
#: The most bytes of it that are read: those of thousands of entries.
_LARGEST = 1 << 20


@dataclass(frozen=True)
class Excluded:
    """An entry: the rank at ``place`` on ``host``. All else is for people: what it was called when it was named."""

    host: str
    place: int
    rank: int | None = None
    step: int | None = None
    attempt: int | None = None
    reason: str = ""
    time: str = ""

    @property
    def at(self) -> tuple[str, int]:
        """Host and place."""
        return self.host, self.place

    @property
    def named(self) -> str:
        """The rank as lines name it."""
        return f"local rank {self.place} of {self.host}"


def read_excluded(folder: Path) -> tuple[Excluded, ...]:
    """The entries in the run ``folder``; none without the file.

    Raises :class:`InputError` for a link in its place, for more than it can be, and for what no run writes there.
    """
    try:
        return tuple(map(_entry, _entries(parse_json(SafeFolder(folder).read(NAME, _LARGEST)))))
    except (FileNotFoundError, NotADirectoryError):  # nor is a folder there
        return ()
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InputError(
            f"{folder / NAME} does not say which ranks are left out",
            why=why,
            fix="mend it, or remove it, which takes all ranks back",
        ) from error


def _entries(content: Any) -> Sequence[Any]:
    found = content.get("ranks") if isinstance(content, dict) else None
    if not isinstance(found, list):
        raise ValueError("it has no list 'ranks'")  # noqa: TRY004  # a line for the user
    return found


def _entry(content: Any) -> Excluded:
    known = content if isinstance(content, dict) else {}
    host, place = known.get("host"), known.get("place")
    if not isinstance(host, str) or not host or type(place) is not int or place < 0:
        raise ValueError(f"{str(content)[:100]!r} has no host and local number 'place'")
    return Excluded(**{name: known[name] for name in Excluded.__dataclass_fields__ if name in known})


def exclude(folder: RunFolder, ranks: Iterable[Excluded]) -> None:
    """Add ``ranks`` to the record of ``folder``, each once. Raises :class:`CheckpointError` where it is not written."""
    try:
        kept = read_excluded(folder.path)
        known = {each.at for each in kept}
        new = [asdict(each) for each in ranks if each.at not in known]
        before = folder.files.kept_json(NAME)
        folder.files.write_json(NAME, {"v": 1, **before, "ranks": [*before.get("ranks", []), *new]})
    except OSError as error:
        why = f"{error.strerror}: {error.filename}"
        raise CheckpointError("which rank is left out cannot be recorded", why=why) from error


def now() -> str:
    """The time of an entry."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def remaining(excluded: Iterable[Excluded], places: Sequence[Excluded]) -> tuple[int, ...]:
    """The ranks, by their number in ``places``, that are not ``excluded``.

    Raises :class:`InputError` where nobody is left.
    """
    out = {each.at for each in excluded}
    left = tuple(rank for rank, place in enumerate(places) if place.at not in out)
    if not left:
        raise InputError(
            "no rank is left to train on",
            why=f"{NAME} in the run folder names all {len(places)} that are there",
            fix="start on other machines, or take entries out of that file",
        )
    return left
