"""Plain text and JSON on standard output; errors on standard error, one line each."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import click

from megatron_run.errors import InputError
from megatron_run.errors.wording import printable
from megatron_run.files.publishing import publishing

#: Whether the command has printed JSON: its answer is one document, also where it ends with a refusal.
_ANSWERED: ContextVar[bool] = ContextVar("answered", default=False)


def start_answer() -> None:
    """A command begins, maybe not the first one in this process."""
    _ANSWERED.set(False)


def print_refusal(content: object) -> None:
    """JSON of a refusal, unless the command has answered in JSON before it ended."""
    if not _ANSWERED.get():
        print_json(content)


def print_json(content: object) -> None:
    """One JSON document; dataclasses become objects."""
    _ANSWERED.set(True)
    click.echo(json.dumps(content, indent=2, default=_plain))


def print_json_line(content: object) -> None:
    """One JSON document on one line, for content that is large: written many times faster than with indentation."""
    _ANSWERED.set(True)
    click.echo(json.dumps(content, default=_plain))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their longest cell, two spaces apart."""
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo(printable("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()))


def write_file(file: Path, text: str) -> None:
    """Write what the user asked for. Raises :class:`InputError` if it cannot be written."""
    try:
        if file.exists() and not file.is_file():  # a pipe, or the terminal
            file.write_text(text, encoding="utf-8")
            return
        with publishing(file) as (written,):
            written.write(text.encode())
    except OSError as error:
        raise InputError(
            f"{file} cannot be written", why=error.strerror or str(error), fix="name another file"
        ) from None


def show_piece(piece: str) -> None:
    """A piece of a text, at once; without what would steer a terminal, if one shows it."""
    sys.stdout.write(
        "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in piece)
        if sys.stdout.isatty()
        else piece
    )
    sys.stdout.flush()


def tell(line: str) -> None:
    """A line of ours beside the output."""
    click.echo(f"megatron-run: {printable(line)}", err=True)


def tell_error(message: str, cause: BaseException | None = None) -> None:
    """Each line of ``message`` with the program's name; continuation lines, which are indented, stay as they are."""
    if cause is not None:
        traceback.print_exception(cause)
    for line in map(printable, message.split("\n")):
        click.echo(line if line.startswith(" ") else f"megatron-run: {line}", err=True)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)
