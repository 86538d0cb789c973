"""Every command that is installed, of the command line and of packages."""

from __future__ import annotations

from collections.abc import Iterator

import click

from megatron_run_cli.command_groups import example_of
from megatron_run_cli.main import program


def every_command(context: click.Context | None = None) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The words of each command and group after ``megatron-run``, and the command; a group before what is in it."""
    with context or program.make_context("megatron-run", [], resilient_parsing=True) as group:
        assert isinstance(group.command, click.Group)
        for name in group.command.list_commands(group):
            command = group.command.get_command(group, name)
            assert command is not None, name
            yield (name,), command
            if isinstance(command, click.Group):
                inner = click.Context(command, parent=group, info_name=name, resilient_parsing=True)
                yield from (((name, *words), each) for words, each in every_command(inner))


def examples() -> dict[str, str]:
    """Command -> the words that follow it in its example."""
    found = {" ".join(words): example_of(command) for words, command in every_command()}
    return {words: typed.removeprefix(f"megatron-run {words} ") for words, typed in found.items() if typed}
