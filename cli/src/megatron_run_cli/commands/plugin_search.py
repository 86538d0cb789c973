"""``megatron-run plugins search``: plugins that are published, or known to this version, and those installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from megatron_run_cli.command_groups import example
from megatron_run_cli.completion import words as places
from megatron_run_cli.grammar import json_option
from megatron_run_cli.output import print_json, print_table, tell

if TYPE_CHECKING:
    from megatron_run_cli.reports.catalogue import Published

#: The most that a terminal is shown of what is found.
_SHOWN = 100


@click.command(epilog=example("plugins search checkpoint"))
@click.argument("parts", nargs=-1, metavar="[WORD]...")
@click.option(
    "--from",
    "place",
    metavar="URL|FILE",
    shell_complete=places.any_path,
    help="The catalogue to search [default: the one that is published, or what this version knows].",
)
@json_option
def search(parts: tuple[str, ...], place: str | None, *, as_json: bool) -> None:
    """Find plugins and commands that have every WORD; all without.

    Kind, name, distribution and summary are looked through. What is installed comes last, with its version.
    """
    from megatron_run_cli.reports.catalogue import search as search_all
    from megatron_run_cli.reports.listing import list_plugins

    found = search_all(parts, _published(place), list_plugins().plugins)
    if as_json:
        print_json(found)
        return
    shown = found[:_SHOWN]
    rows = [
        (each.kind, each.name, each.distribution, each.version and f"installed {each.version}", each.summary)
        for each in shown
    ]
    print_table(rows)
    if not found:
        tell(f"nothing has {' and '.join(map(repr, parts))}")
    if len(found) > len(shown):
        tell(f"and {len(found) - len(shown)} more; name another WORD too, or add --json")
    if missing := [each for each in shown if not each.version]:
        from megatron_run.errors.install_hint import how_to_install

        tell(f"to install the first: {how_to_install(missing[0].distribution)}")


def _published(place: str | None) -> tuple[Published, ...]:
    """The catalogue at ``place``, else the published one, else what this version knows.

    A line says so where one cannot be had.
    """
    from megatron_run_cli.reports.catalogue import UnreachableError, known_here, published_at, read_catalogue

    place = place or published_at()
    if not place:
        return known_here()
    try:
        return read_catalogue(place)
    except UnreachableError as error:
        tell(f"the catalogue {place} cannot be had: {error}; what follows is known to this version, or installed")
        return known_here()
