"""A plugin or command by its name alone: the one that is called so, or all that could be meant."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_run.contracts.plugin import COMMAND, KINDS
from megatron_run.errors import InputError
from megatron_run.errors.wording import advice, similar_word
from megatron_run.registry.discover import Catalog
from megatron_run.registry.known import KNOWN, KNOWN_COMMANDS


def called(name: str, catalog: Catalog) -> tuple[str, ...]:
    """``KIND=NAME`` of each plugin and command called ``name``, those of this project also where not installed."""
    return tuple(f"{kind}={each}" for kind, each in _names(catalog) if each == name)


def with_kind(name: str, catalog: Catalog, origin: str) -> str:
    """``KIND=NAME`` of the plugin or command called ``name``.

    Raises :class:`InputError` where several kinds have one, listing them, and where none has, with what is alike.
    """
    found = called(name, catalog)
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"{len(found)} plugins are called {name!r}", origin=origin, fix=f"name {' or '.join(found)}")
    kind = name.replace("_", "-")
    if kind in (*KINDS, COMMAND):
        its = ", ".join(dict.fromkeys(map(str, catalog.of_kind(kind))))
        raise InputError(f"{name!r} is a kind of plugins", origin=origin, fix=f"name one of {its or 'them'}")
    near = similar_word(name, [*KINDS, COMMAND, *(each for _, each in _names(catalog))])
    meant = f"did you mean {' or '.join(called(near, catalog)) or near}?" if near else ""
    fix = advice(meant, "megatron-run plugins list shows all")
    raise InputError(f"no plugin is called {name!r}", origin=origin, fix=fix)


def _names(catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Kind and name of all that is installed, and of what is not and may be; each once."""
    installed = [(each.kind, each.name) for kind in (*KINDS, COMMAND) for each in catalog.of_kind(kind)]
    first_party = [(each.kind, each.name) for each in KNOWN]
    yield from dict.fromkeys([*installed, *first_party, *((COMMAND, name) for name in KNOWN_COMMANDS)])
