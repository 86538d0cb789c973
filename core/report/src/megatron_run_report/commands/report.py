"""``megatron-run report``: one run or two on a page, or any number as a table."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from megatron_run.errors import InputError, refuse_taken
from megatron_run.files.latest_run import DEFAULT_RUN, follow_latest
from megatron_run_cli.command_groups import example
from megatron_run_cli.completion.words import any_path
from megatron_run_cli.grammar import json_option, overwrite_option
from megatron_run_cli.output import print_json, print_table, tell, write_file

if TYPE_CHECKING:
    from megatron_run_report.record import Record

#: The most runs that a page holds side by side.
_SIDE_BY_SIDE = 2


@click.command(epilog=example("report runs/latest"))
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN]...", shell_complete=any_path)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default="report.html",
    show_default=True,
    metavar="FILE",
    help="What to write; an earlier report is replaced.",
)
@click.option("--text", "as_text", is_flag=True, help="Print a table of any number of runs, and write nothing.")
@overwrite_option
@json_option
def report(runs: tuple[Path, ...], *, output: Path, as_text: bool, overwrite: bool, as_json: bool) -> None:
    """Write one HTML file about a run or two, or print a table.

    The page has curves, memory, schedule, samples, events and environment. RUN is a run folder [default:
    runs/latest], which may still be going on, or a sweep's, for its runs.
    """
    from megatron_run_report.named import named_runs

    records = named_runs(runs or (DEFAULT_RUN,), tell)
    if as_text or as_json:
        _show(records, as_json=as_json)
        return
    from megatron_run_report.page import is_report, page

    output = follow_latest(output)
    if len(records) > _SIDE_BY_SIDE:
        raise InputError(f"a page holds {_SIDE_BY_SIDE} runs", why=f"{len(records)} are named", fix="add --text")
    if not output.parent.is_dir():
        raise InputError(f"{output} cannot be written", why="its folder does not exist", fix="name another --output")
    if any(record.holds(output) for record in records):
        raise InputError(f"{output} is a file of the run", fix="name another --output")
    refuse_taken(output, "--output", overwrite=overwrite or is_report(output), inputs=())
    write_file(output, page(records))
    if output.is_file():  # and no pipe, into which the page went
        click.echo(f"written: {quote(str(output))}")


def _show(records: list[Record], *, as_json: bool) -> None:
    """Print the numbers of the runs, and the keys in which they differ."""
    from megatron_run_report.numbers import HEAD, differences, row_of, summary

    found, differing = [summary(record) for record in records], differences(records)
    if as_json:
        print_json({"runs": [each.as_data() for each in found], "differences": differing})
        return
    print_table([HEAD, *map(row_of, found)])
    if differing:
        click.echo()
        print_table([("differs", *(each.run for each in found)), *((key, *row) for key, row in differing.items())])
