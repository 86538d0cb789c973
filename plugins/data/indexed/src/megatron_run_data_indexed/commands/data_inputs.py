"""Options of ``megatron-run data`` about the texts that its commands read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from megatron_run_cli.completion import words as places
from megatron_run_cli.grammar import Command, files_here, tokenizer_here, with_options
from megatron_run_cli.output import tell

if TYPE_CHECKING:
    from megatron_run_data_indexed.preparation.inputs import Format, Input
    from megatron_run_data_indexed.preparation.records import Policy, Reading

TOKENIZER = "bytes, hf:ORG/NAME, or a file or folder: tokenizer.json, vocab.json, vocab.txt, .model."
tokenizer_option = partial(
    click.option,
    "--tokenizer",
    metavar="NAME",
    callback=tokenizer_here,
    shell_complete=places.one_of_or_path("bytes"),
)
_TEXTS = (
    click.argument("names", nargs=-1, required=True, metavar="INPUT...", shell_complete=places.any_path),
    click.option("--json-key", "key", default="text", show_default=True, metavar="KEY", help="Key or column of text."),
    click.option(
        "--separator",
        metavar="TEXT",
        help=r"What ends a document of a text, as '\n\n' [default: a file is one document].",
    ),
    click.option(
        "--format",
        "form",
        type=click.Choice(["jsonl", "text", "parquet"]),
        help="What INPUTs hold [default: by ending].",
    ),
)
_MALFORMED = click.option(
    "--malformed",
    type=click.Choice(["refuse", "skip", "keep"]),
    default="refuse",
    show_default=True,
    help="End at the first malformed record, leave them out, or keep what is there as text.",
)


class Texts(NamedTuple):
    """The files of a command, which have the format ``form`` if not that of their endings, and how to read them."""

    inputs: tuple[Input, ...]
    form: Format | None
    reading: Reading


def texts_options(*, malformed: bool = True) -> Callable[[Command], Command]:
    """Give a command its INPUTs and how they are read, as one argument ``texts``.

    Unless the user says what becomes of what is ``malformed``, it is left out.
    """

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_texts(
            names: tuple[str, ...],
            key: str,
            separator: str | None,
            form: Format | None,
            malformed: Policy = "skip",
            **others: Any,
        ) -> Any:
            from megatron_run_data_indexed.preparation.records import Reading

            inputs, left_out = inputs_of(names, form)
            if left_out:
                tell(f"{left_out} files of other endings are left out")
            texts = Texts(tuple(inputs), form, Reading(key, _unescaped(separator), malformed))
            return command(texts=texts, **others)

        return with_options(with_texts, *_TEXTS, *([_MALFORMED] if malformed else []))

    return decorate


def inputs_of(names: tuple[str, ...], form: Format | None) -> tuple[list[Input], int]:
    """The files of ``names`` and how many were left out; a dataset of another place is fetched first."""
    from megatron_run_data_indexed.preparation.inputs import find_inputs, is_text

    return find_inputs(files_here(names, partial(is_text, form=form)), form)


def _unescaped(separator: str | None) -> bytes | None:
    """The bytes of what was typed, in which backslash n and t stand for a line's end and a tabulator."""
    if separator is None:
        return None
    if not separator:
        raise click.UsageError("--separator is empty")
    return separator.replace("\\n", "\n").replace("\\t", "\t").encode()
