"""The catalogue of plugins that the site publishes, as JSON: read from its address or a file, and searched.

Without one there is what this version knows: plugins and commands of this project, and in a checkout those by others.

Whoever serves it may be anybody: what is read is bounded in bytes, in time and in entries, and nothing of it is run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from megatron_run.contracts.plugin import COMMAND
from megatron_run.errors import DataError
from megatron_run.errors.install_hint import checkout
from megatron_run.errors.wording import near_path
from megatron_run.files.foreign_file import read_file
from megatron_run.files.safe_folder import parse_json
from megatron_run_cli.reports.listing import summary_of

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

    from megatron_run_cli.reports.listing import ListedPlugin

#: Where the address stands, in the metadata of the command's distribution: ``[project.urls]`` of its pyproject.
_DISTRIBUTION, _LABEL = "megatron-run-cli", "Catalogue"
#: The most bytes that are read, the seconds that a server has in all, and those for its next bytes.
LONGEST, SECONDS, PATIENCE = 1 << 22, 20.0, 5.0
_SCHEMES = ("https", "http")

Words = Annotated[str, Field(max_length=200)]


class Published(BaseModel, frozen=True):
    """An entry of the catalogue; other keys are of later versions."""

    kind: Words
    name: Words
    distribution: Words = Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
    summary: Words = ""
    url: Words = ""


class _Catalogue(BaseModel):
    v: Literal[1]
    plugins: tuple[Published, ...] = Field(max_length=10_000)


class UnreachableError(Exception):
    """Nobody answers at the address, for the reason that this says."""


@dataclass(frozen=True)
class Match:
    """A plugin or command that fits what is searched; ``version`` is that which is installed, or empty."""

    kind: str
    name: str
    distribution: str
    version: str
    summary: str
    url: str = ""


def published_at() -> str:
    """The address of the catalogue; empty where the distribution names none."""
    with suppress(PackageNotFoundError):
        for line in metadata(_DISTRIBUTION).get_all("Project-URL") or ():
            label, _, address = line.partition(",")
            if label.strip() == _LABEL:
                return str(address.strip())
    return ""


def read_catalogue(place: str) -> tuple[Published, ...]:
    """The entries of the catalogue at ``place``, an address or a file.

    Raises :class:`UnreachableError` for an address where nobody answers, :class:`DataError` for what is no catalogue.
    """
    is_address = urlsplit(place).scheme in _SCHEMES
    content = _fetch(place) if is_address else _read(Path(place))
    try:
        return _Catalogue.model_validate(parse_json(content)).plugins
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}"
    except ValueError as error:
        why = str(error)
    raise DataError(f"{place} is no catalogue of plugins", why=why[:200], fix="name another with --from")


def known_here() -> tuple[Published, ...]:
    """The catalogue without a network: what the kernel knows of this project, and a checkout of others."""
    from megatron_run.registry.known import COMMAND_SUMMARIES, KNOWN, KNOWN_COMMANDS

    found = [
        Published(kind=each.kind, name=each.name, distribution=each.distribution, summary=each.summary)
        for each in KNOWN
    ]
    found += [
        Published(kind=COMMAND, name=name, distribution=distribution, summary=COMMAND_SUMMARIES.get(name, ""))
        for name, distribution in KNOWN_COMMANDS.items()
    ]
    return (*found, *_by_others())


def _by_others() -> Iterator[Published]:
    """The lines of the checkout's list that are right; none without a checkout, or a list."""
    import csv

    root = checkout()
    with suppress(OSError, ValueError, csv.Error):
        text = read_file(root / "plugins" / "by-others.csv", LONGEST).decode() if root else ""
        for row in csv.DictReader(text.split("\n")):
            with suppress(ValidationError):
                yield Published.model_validate(row)


def _read(file: Path) -> bytes:
    try:
        return read_file(file, LONGEST)
    except OSError as error:
        raise DataError(
            f"the catalogue {file} cannot be read", why=error.strerror or str(error), fix=near_path(file)
        ) from None


def _fetch(address: str) -> bytes:
    """The document at ``address``. Raises :class:`UnreachableError`, also for one that is too long or too slow."""
    from http.client import HTTPException

    end = time.monotonic() + SECONDS
    pieces, size = [], 0
    try:
        with _opener().open(address, None, PATIENCE) as answer:
            while piece := answer.read1(1 << 16):
                size += len(piece)
                pieces.append(piece)
                if size > LONGEST:
                    raise UnreachableError(f"it has more than {LONGEST} bytes")
                if time.monotonic() > end:
                    raise UnreachableError(f"it takes longer than {SECONDS:g} s")
    except (OSError, HTTPException, ValueError) as error:  # of URLError the reason is what to know
        raise UnreachableError(str(getattr(error, "reason", "") or error)) from error
    return b"".join(pieces)


def _opener() -> OpenerDirector:
    """An opener of addresses of the two schemes alone: a redirection leads to no file, and to no other service."""
    from urllib import request

    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        request.HTTPHandler(),
        request.HTTPSHandler(),
        request.HTTPDefaultErrorHandler(),
        request.HTTPRedirectHandler(),
        request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def search(words: Sequence[str], published: Iterable[Published], installed: Iterable[ListedPlugin]) -> list[Match]:
    """All that has each of ``words`` in kind, name, distribution or summary, whatever their case; the installed last.

    What is installed and not published is found too; of what is installed without a published summary, its own counts.
    """
    present = {(each.kind, each.name, each.distribution): each for each in installed}
    found = []
    for entry in published:
        here = present.pop((entry.kind, entry.name, entry.distribution), None)
        version = here.version if here else ""
        summary = entry.summary or (summary_of(here.distribution) if here else "")
        found.append(Match(entry.kind, entry.name, entry.distribution, version, summary, entry.url))
    found += [
        Match(each.kind, each.name, each.distribution, each.version, summary_of(each.distribution))
        for each in present.values()
    ]
    asked = [each.lower() for each in words]
    fitting = [each for each in found if all(part in _text(each) for part in asked)]
    return sorted(fitting, key=lambda each: (bool(each.version), each.kind, each.name, each.distribution))


def _text(match: Match) -> str:
    return f"{match.kind}={match.name} {match.distribution} {match.summary}".lower()
