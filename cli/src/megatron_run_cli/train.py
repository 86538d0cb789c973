"""``megatron-run [CONFIG...]``: train, or with ``--dry-run`` say what would be trained."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from megatron_run_cli.options import SavedStep, json_option, run_options
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
    help="Where the ranks come from; auto: a world that torchrun or srun made, else local ranks.",
)
@click.option(
    "--resume",
    type=SavedStep(),
    default="auto",
    metavar="auto|never|STEP",
    help="What of the run folder to go on from; auto: the newest saved step.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Start the local ranks again after one was lost, N times at most, from the newest saved step.",
)
@click.option(
    "--allow-plugin-change",
    type=click.Choice(["optimizer", "scaler"]),
    multiple=True,
    metavar="KIND",
    help="Go on without the state of that kind of plugin: optimizer or scaler.",
)
@click.option("--dry-run", is_flag=True, help="Resolve and check everything, print it, train nothing.")
@json_option
@click.option("--quiet", is_flag=True, help="Print errors only.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error, the ranks' in their logs.")
def train(  # noqa: PLR0913  # one argument an option: so click calls it
    request: Request,
    mode: LaunchMode,
    *,
    resume: str,
    max_restarts: int,
    allow_plugin_change: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> int:
    """Train a model; no CONFIG is preset:laptop."""
    request = replace(request, resume=resume, allow_plugin_change=allow_plugin_change)
    if dry_run:
        from megatron_run.planning import resolve
        from megatron_run_engine.launch.process import why_not_here
        from megatron_run_engine.training.dry_run import dry_run_json, dry_run_text

        run = resolve(request)
        why_not = why_not_here(run)
        notices = [f"this machine cannot train it: {why_not}"] if why_not else []
        if as_json:
            print_json({**(told := dry_run_json(run)), "notices": [*told["notices"], *notices]})
        else:
            click.echo("\n\n".join([dry_run_text(run), *(f"note: {notice}" for notice in notices)]))
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
