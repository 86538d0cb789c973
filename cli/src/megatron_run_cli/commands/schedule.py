"""``megatron-run schedule``: what a schedule does, proven and drawn before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from megatron_run.errors import ScheduleError, refuse_input
from megatron_run_cli.command_groups import Commands
from megatron_run_cli.grammar import json_option, run_options
from megatron_run_cli.output import print_json_line

if TYPE_CHECKING:
    from megatron_run.config.request import Request

_SIZE = click.IntRange(min=1)
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group(cls=Commands)
def schedule() -> None:
    """Verify and draw pipeline schedules."""


@schedule.command()
@run_options
@click.option("--stages", type=_SIZE, metavar="P", help="Pipeline stages [default: parallel.pipeline].")
@click.option("--chunks", type=_SIZE, metavar="V", help="Chunks of the model per stage [default: parallel.chunks].")
@click.option(
    "--microbatches", type=_SIZE, metavar="M", help="Microbatches per step [default: the run's largest number]."
)
@click.option(
    "--layers",
    type=_SIZE,
    metavar="L",
    help="Layers [default: model.num_layers; without CONFIG, with P or V: one per chunk].",
)
@click.option("--svg", type=_FILE, metavar="FILE", help="Also write a picture.")
@click.option("--trace", type=_FILE, metavar="FILE", help="Also write a trace for https://ui.perfetto.dev.")
@json_option
def show(
    request: Request,
    *,
    stages: int | None,
    chunks: int | None,
    microbatches: int | None,
    layers: int | None,
    svg: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Verify one step of a schedule and draw its timeline."""
    from megatron_run.planning.input_files import input_files
    from megatron_run.planning.schedule_only import Shape, ask_schedule
    from megatron_run_cli.reports import schedule_report as report

    for file, option in ((svg, "--svg"), (trace, "--trace")):
        if file:
            refuse_input(file, option, input_files(request))
    asked = ask_schedule(request, Shape(stages, chunks, microbatches, layers))
    try:
        plan = asked.plan()
    except ScheduleError as fault:
        if as_json:
            parallel = asked.parallel
            print_json_line(report.fault_record(parallel.pipeline, parallel.chunks, asked.microbatches, str(fault)))
        raise
    title = str(asked.schedule)
    if svg:
        report.write_svg(plan, title, svg)
    if trace:
        report.write_trace(plan, title, trace)
    if as_json:
        print_json_line(report.plan_record(plan))
        return
    click.echo(report.plan_text(plan, title))
    for notice in asked.notices:
        click.echo(f"note: {notice}")
    for file in filter(None, (svg, trace)):
        click.echo(f"written: {file}")
