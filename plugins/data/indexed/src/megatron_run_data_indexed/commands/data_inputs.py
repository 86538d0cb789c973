"""Options of ``megatron-run data`` about the texts that its commands read."""

from __future__ import annotations

from functools import partial

import click

from megatron_run_cli.completion import words as places
from megatron_run_cli.grammar import tokenizer_here

INPUTS = click.argument("names", nargs=-1, required=True, metavar="INPUT...", shell_complete=places.any_path)
TOKENIZER = "bytes, hf:ORG/NAME, or a file or folder: tokenizer.json, vocab.json, vocab.txt, .model."
tokenizer_option = partial(
    click.option,
    "--tokenizer",
    metavar="NAME",
    callback=tokenizer_here,
    shell_complete=places.one_of_or_path("bytes"),
)
FORM = click.option(
    "--format", "form", type=click.Choice(["jsonl", "text", "parquet"]), help="What INPUTs hold [default: by ending]."
)
KEY = click.option("--json-key", "key", default="text", show_default=True, metavar="KEY", help="Key or column of text.")
SEPARATOR = click.option(
    "--separator", metavar="TEXT", help=r"What ends a document of a text, as '\n\n' [default: a file is one document]."
)
MALFORMED = click.option(
    "--malformed",
    type=click.Choice(["refuse", "skip", "keep"]),
    default="refuse",
    show_default=True,
    help="End at the first malformed record, leave them out, or keep what is there as text.",
)
