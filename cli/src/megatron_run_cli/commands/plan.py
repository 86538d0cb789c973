"""``megatron-run plan``: how long a step takes before it runs, and how far such predictions can be trusted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from megatron_run_cli.grammar import debug_option, json_option
from megatron_run_cli.output import print_json_line

if TYPE_CHECKING:
    from megatron_run_planner.workload import Recompute

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group(subcommand_metavar="check TABLE")
def plan() -> None:
    """Predict the time of a step.

    \b
    megatron-run plan check TABLE.csv --device a100   predictions beside measured steps
    """  # noqa: D301  # click wants the character, not its name


@plan.command()
@click.argument("table", type=_FILE)
@click.option("--device", required=True, metavar="NAME|FILE", help="A shipped device, or a YAML file.")
@click.option(
    "--recompute",
    type=click.Choice(["auto", "none", "core", "full"]),
    default="auto",
    show_default=True,
    help="What the runs of TABLE recomputed; auto: full from the smallest model on that would not fit without.",
)
@click.option("--vocabulary", type=click.IntRange(min=1), default=51200, show_default=True, metavar="V")
@click.option("--rows", is_flag=True, help="List every row, not the worst ten.")
@json_option
@debug_option
def check(
    table: Path, device: str, *, recompute: Recompute | Literal["auto"], vocabulary: int, rows: bool, as_json: bool
) -> None:
    """Compare predictions with the measured steps of TABLE, one run of Megatron-LM or Megatron-DeepSpeed a row."""
    from megatron_run_cli.reports.plan_report import accuracy_record, accuracy_text
    from megatron_run_planner.accuracy import compare, read_table
    from megatron_run_planner.hardware import read_device
    from megatron_run_planner.schedules import Schedules

    machine = read_device(device)
    measured = read_table(table, vocabulary, None if recompute == "auto" else recompute, machine.memory)
    found = compare(measured, machine, Schedules())
    if as_json:
        print_json_line(accuracy_record(found, machine))
    else:
        click.echo(accuracy_text(found, machine, every=rows))
