"""``megatron-run config``: what a run is configured to do, and what can be configured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from megatron_run_cli.options import debug_option, json_option, run_options
from megatron_run_cli.output import print_json, tell

if TYPE_CHECKING:
    from megatron_run.config.request import Request


@click.group()
def config() -> None:
    """Show and explain the configuration."""


@config.command()
@run_options
@json_option
@debug_option
def show(
    request: Request,
    *,
    as_json: bool,
) -> None:
    """Print the resolved configuration, each key with where it came from."""
    from megatron_run.planning import resolve
    from megatron_run_cli.reports import resolved_config

    run = resolve(request, plan_only=True)
    if as_json:
        print_json(resolved_config.show_json(run))
    else:
        click.echo(resolved_config.show(run), nl=False)


@config.command()
@click.argument("key")
@run_options
@debug_option
def explain(
    key: str,
    request: Request,
) -> None:
    """Say what KEY (train.lr) or a whole section (train) means; with a CONFIG or options, also its value there."""
    from megatron_run.planning import resolve
    from megatron_run_cli.reports import keys

    run = resolve(request, plan_only=True) if request.configs or request.plugins or request.sets else None
    click.echo(keys.explain(key, run))


@config.command()
@debug_option
def schema() -> None:
    """Print the JSON schema of a configuration file that may use any installed plugin; for editors."""
    from megatron_run_cli.reports.json_schema import json_schema
    from megatron_run_cli.reports.keys import installed_plugins, without_engine

    installed = installed_plugins()
    lacking = [str(without_engine(installed.lacking))] if installed.lacking else []
    for notice in (*installed.notices, *lacking):
        tell(notice)
    print_json(json_schema(installed.plugins))


@config.command("from-megatron")
@click.argument("script", type=click.Path(path_type=Path), metavar="SCRIPT")
@debug_option
def from_megatron(script: Path) -> None:
    """Turn the flags of a Megatron-LM launch script into a configuration; the script is read, never run.

    The YAML says where each value is from, and at its end which flags have no counterpart. What would make the run
    another than the script's is told on standard error too.
    """
    from megatron_run.config.megatron.script import load_script
    from megatron_run.config.megatron.translate import translate
    from megatron_run.config.megatron.write import yaml

    translation = translate(load_script(script), str(script))
    for warning in translation.warnings:
        tell(warning)
    click.echo(yaml(translation, str(script)), nl=False)
