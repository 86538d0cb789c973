"""``megatron-run [CONFIG...]``: train, or with ``--dry-run`` say what would be trained."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from megatron_run_cli.grammar import SavedStep, json_option, run_options
from megatron_run_cli.output import print_json, tell, tell_error

if TYPE_CHECKING:
    from megatron_run.config.request import Request
    from megatron_run_engine.launch import LaunchMode, RunResult


@click.command()
@run_options
@click.option(
    "--launch",
    "mode",
    type=click.Choice(["auto", "local", "torchrun", "slurm"]),
    default="auto",
    help="Source of the ranks; auto: torchrun or srun if started by them, else local [default: auto].",
)
@click.option(
    "--resume",
    type=SavedStep(),
    default="auto",
    metavar="auto|never|STEP",
    help="Saved step to resume from; auto: the newest; never: start anew [default: auto].",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Restart local ranks from the newest saved step after one was lost, at most N times [default: 0].",
)
@click.option("--extend", is_flag=True, help="Resume with more train.steps or train.samples.")
@click.option(
    "--allow-change",
    multiple=True,
    metavar="KEY[,KEY...]",
    help="Resume with another value of these keys or sections, as train.lr,data; repeatable.",
)
@click.option(
    "--allow-plugin-change",
    type=click.Choice(["optimizer", "scaler"]),
    multiple=True,
    metavar="KIND",
    help="Drop the saved state of the optimizer or scaler; repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Check and print everything, train nothing.")
@json_option
@click.option("--quiet", is_flag=True, help="Print errors only.")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors; those of ranks in their logs.")
def train(  # noqa: PLR0913  # one argument an option: so click calls it
    request: Request,
    mode: LaunchMode,
    *,
    resume: str,
    max_restarts: int,
    extend: bool,
    allow_change: tuple[str, ...],
    allow_plugin_change: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> int:
    """Train a model.

    CONFIG is a YAML or JSON file, preset:NAME, or - for standard input [default: preset:laptop].
    """
    request = replace(
        request,
        resume=resume,
        extend=extend,
        allow_change=tuple(name.strip() for names in allow_change for name in names.split(",")),
        allow_plugin_change=allow_plugin_change,
    )
    if dry_run:
        from megatron_run.planning import resolve
        from megatron_run_cli.reports.dry_run import dry_run_json, dry_run_text

        run = resolve(request, plan_only=True)
        if as_json:
            print_json(dry_run_json(run))
        else:
            click.echo(dry_run_text(run))
        return 0
    from megatron_run_engine.launch import LaunchOptions, launch

    silent = (lambda _: None) if quiet else tell
    options = LaunchOptions(sys.argv[1:], quiet=quiet or as_json, debug=debug, max_restarts=max_restarts, tell=silent)
    result = launch(request, options, mode)
    if result.message:
        tell_error(result.message)
    if as_json:
        print_json(_as_json(result))
    return int(result.code)


def _as_json(result: RunResult) -> dict[str, object]:
    """What a script wants to know of a run that has ended."""
    return {
        "exit_code": int(result.code),
        "retry": result.code.retry,
        "message": result.message,
        "folder": str(result.folder) if result.folder else None,
    }
