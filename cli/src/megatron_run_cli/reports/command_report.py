"""The output of ``megatron-run plugins info command=NAME`` as data."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import click

from megatron_run.errors import PluginError
from megatron_run.errors.wording import did_you_mean
from megatron_run.registry.commands import choose_command, missing_command
from megatron_run.registry.loaded_command import load_command
from megatron_run_cli.command_groups import catalog_of, example_of

#: Longest line about a command within a group.
_ABOUT = 90


@dataclass(frozen=True)
class CommandDescription:
    """A command of a package: who brings it, where it is, what it does; of a group, what is in it, by name."""

    name: str
    typed: str
    distribution: str
    version: str
    location: str
    about: str
    example: str
    commands: dict[str, str]


def describe_command(name: str, program: click.Context) -> CommandDescription:
    """The command of the entry point ``name``, which is imported. Raises :class:`PluginError` where there is none."""
    catalog, place = catalog_of(program), name.replace(" ", ".").split(".")
    entry = choose_command(catalog, place)
    if entry is None:
        fix = did_you_mean(name, [each.name for each in catalog.commands])
        raise missing_command(catalog, place, exact=True) or PluginError(
            f"no installed package has the command {name!r}", fix=fix
        )
    command = load_command(entry)
    inner: dict[str, str] = {}
    if isinstance(command, click.Group):
        context = program
        for part in place:
            context = click.Context(command, parent=context, info_name=part)
        found = {child: command.get_command(context, child) for child in command.list_commands(context)}
        inner = {child: each.get_short_help_str(_ABOUT) for child, each in found.items() if each}
    return CommandDescription(
        entry.name,
        f"megatron-run {' '.join(place)}",
        entry.distribution,
        entry.version,
        inspect.getfile(command.callback) if command.callback else entry.location,
        command.get_short_help_str(_ABOUT),
        example_of(command),
        inner,
    )
