"""What a page says that a command prints is what it prints; every command on a page can be typed."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from megatron_run_cli.main import program
from tests.support.consoles import Shown, printed, shown
from tests.support.quoted import pages

PAGES = {page.name if page.parent.name == "docs" else str(page.parent.name): page.read_text("utf-8") for page in pages()}
SHOWN = {f"{name}: {each.command}": each for name, page in PAGES.items() for each in shown(page)}
TYPED = sorted({line for page in PAGES.values() for line in re.findall(r"^(?:\$ )?(megatron-run(?: .*)?)$", page, re.M)})


@pytest.mark.parametrize("where", SHOWN)
def test_a_command_prints_what_the_page_shows(where: str) -> None:
    output = printed(SHOWN[where].command)
    assert SHOWN[where].agrees(output), output


@pytest.mark.parametrize("line", TYPED)
def test_a_command_has_the_words_that_the_page_uses(line: str) -> None:
    """Parse the line down to the last group of commands, and run nothing."""
    command: click.Command = program
    words = shlex.split(line, comments=True)[1:]
    parent: click.Context | None = None
    while True:
        context = command.make_context(command.name, words, parent=parent)
        if not isinstance(command, click.Group):
            return
        rest = [*context._protected_args, *context.args]
        _, found, words = command.resolve_command(context, rest)
        assert found is not None, rest
        command, parent = found, context


def test_other_output_is_found() -> None:
    console = Shown("megatron-run --version", "a\n...\nz\n")
    assert console.agrees("a\nz\n")
    assert console.agrees("a\nb\nc\nz\n")
    assert not console.agrees("a\nb\n")
    assert not console.agrees("b\na\nz\n")
