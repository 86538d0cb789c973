"""``megatron-run checkpoint``: which steps were saved, whether they are intact, and what is in them."""

from __future__ import annotations

from pathlib import Path

import click

from megatron_run.errors import ExitCode
from megatron_run_cli.command_groups import Commands
from megatron_run_cli.grammar import json_option, step_option
from megatron_run_cli.output import print_json, print_table

_FOLDER = click.argument("folder", required=False, type=click.Path(path_type=Path), metavar="[FOLDER]")


@click.group(cls=Commands)
def checkpoint() -> None:
    """List, verify and inspect saved steps.

    FOLDER is a run folder, its checkpoints, or one saved step [default: runs/latest].
    """


@checkpoint.command("list")
@_FOLDER
@json_option
def list_(folder: Path | None, *, as_json: bool) -> None:
    """List saved steps; checks manifests and lengths, not contents."""
    from megatron_run_cli.reports import saved_steps
    from megatron_run_engine.checkpoint.step_folder import find_checkpoints

    checkpoints, _ = find_checkpoints(folder)
    findings = list(saved_steps.check(checkpoints))
    if as_json:
        steps = [finding.record for finding in findings]
        print_json({"folder": str(checkpoints.path), "latest": checkpoints.hint(), "steps": steps})
        return
    print_table(saved_steps.list_rows(findings, checkpoints.hint()))


@checkpoint.command()
@_FOLDER
@step_option("FOLDER", otherwise="all")
@json_option
def verify(folder: Path | None, *, step: int | None, as_json: bool) -> int:
    """Compare every byte with what was saved; code 5 if damaged."""
    from megatron_run_cli.reports import saved_steps
    from megatron_run_engine.checkpoint.step_folder import find_checkpoints

    checkpoints, named = find_checkpoints(folder)
    chosen = [each for each in (step, named) if each is not None][:1]
    findings = []
    for finding in saved_steps.check(checkpoints, chosen, thorough=True):
        findings.append(finding)
        if not as_json:
            click.echo(saved_steps.verify_text(finding))
    if as_json:
        print_json({"folder": str(checkpoints.path), "steps": [finding.record for finding in findings]})
    return int(ExitCode.DATA if any(finding.problem for finding in findings) else ExitCode.DONE)


@checkpoint.command()
@_FOLDER
@step_option("FOLDER")
@json_option
def inspect(folder: Path | None, *, step: int | None, as_json: bool) -> None:
    """Show counters, plugins, topology, files and tensors of a step."""
    from megatron_run_cli.reports import saved_steps
    from megatron_run_engine.checkpoint.step_folder import find_step

    checkpoints, chosen = find_step(folder, step)
    manifest = checkpoints.manifest(chosen)
    if as_json:
        print_json(manifest.model_dump(mode="json"))
    else:
        click.echo(saved_steps.inspect_text(manifest))
