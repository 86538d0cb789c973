"""Commands that packages add to ``megatron-run``, by metadata alone: which there are, and whose a place is.

A command's *place* is its words after ``megatron-run``: ``("data", "cache")`` is the entry point ``data.cache``.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_run import __version__
from megatron_run.contracts.plugin import COMMAND
from megatron_run.errors import EngineMissingError, PluginError
from megatron_run.errors.install_hint import ENGINE, how_to_install
from megatron_run.registry.discover import Catalog, Entry
from megatron_run.registry.known import COMMAND_SUMMARIES, KNOWN_COMMANDS

Place = Sequence[str]
#: Begins the epilog of a command's help: a whole command line, which an error quotes where words are missing.
EXAMPLE = "Example: "


def words_of(entry: Entry) -> str:
    """The words of a command as somebody types them: ``data cache``."""
    return entry.name.replace(".", " ")


def choose_command(catalog: Catalog, place: Place) -> Entry | None:
    """The command at ``place``, None where no package offers it. Raises :class:`PluginError` where several do."""
    offers = catalog.offering(COMMAND, ".".join(place))
    if len(offers) > 1:
        raise offered_twice(place, [entry.source for entry in offers])
    return offers[0] if offers else None


def offered_twice(place: Place, sources: Sequence[str]) -> PluginError:
    """The error for a command that several distributions offer."""
    return PluginError(
        f"the command {' '.join(place)!r} is offered by {len(sources)} distributions",
        why=", ".join(sources),
        fix="uninstall all but one of them",
    )


def known_summary(catalog: Catalog, place: Place) -> str:
    """The line of help of the first-party command at ``place``, without its import.

    Empty where its package must be asked: another one offers it too, or it is of another release than the kernel.
    """
    name = ".".join(place)
    offers = [(entry.distribution, entry.version) for entry in catalog.offering(COMMAND, name)]
    return COMMAND_SUMMARIES.get(name, "") if offers == [(KNOWN_COMMANDS.get(name), __version__)] else ""


def next_words(catalog: Catalog, place: Place) -> dict[str, tuple[str, ...]]:
    """The words that packages add after ``place``, each with the sources of the commands that it begins or is."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in catalog.commands:
        words = entry.name.split(".")
        if len(words) > len(place) and words[: len(place)] == [*place]:
            name = words[len(place)]
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), entry.source)))
    return found


def missing_command(catalog: Catalog, place: Place, *, exact: bool) -> PluginError | None:
    """The error that says what to install for a first-party command at ``place`` that is not installed.

    None where there is none. Without ``exact`` a command counts too whose first words are a group that is missing:
    which commands are in it, only its package knows.
    """
    installed = {entry.name for entry in catalog.commands}
    for length in range(len(place), len(place) - 1 if exact else 0, -1):
        name = ".".join(place[:length])
        if name in KNOWN_COMMANDS and name not in installed:
            error = EngineMissingError if KNOWN_COMMANDS[name] == ENGINE else PluginError
            fix = how_to_install(KNOWN_COMMANDS[name])
            return error(f"no installed package has the command {' '.join(place)!r}", fix=fix)
    return None
