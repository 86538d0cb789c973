"""``megatron-run config``: what a run is configured to do, and what can be configured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megatron_run_cli.command_groups import Commands, example
from megatron_run_cli.completion import words
from megatron_run_cli.editor_schema import SCHEMA, schema_line
from megatron_run_cli.grammar import json_option, run_options
from megatron_run_cli.output import print_json, tell, write_file

if TYPE_CHECKING:
    from megatron_run.config.request import Request


@click.group(cls=Commands)
def config() -> None:
    """Show and explain the configuration."""


@config.command()
@run_options
@json_option
def show(
    request: Request,
    *,
    as_json: bool,
) -> None:
    """Print the resolved configuration with origins."""
    from megatron_run.planning import resolve
    from megatron_run.registry.importing import no_files_run
    from megatron_run_cli.reports import config_report

    with no_files_run():
        run = resolve(request, plan_only=True)
    for plugin in run.unloaded:
        if plugin.entry is not None and plugin.entry.file:
            tell(f"{plugin} is a file, which was not run: its options are as they were written")
    if as_json:
        print_json(config_report.show_json(run))
    else:
        click.echo(config_report.show(run), nl=False)


@config.command(epilog=example("config explain train.lr"))
@click.argument("key", shell_complete=words.key)
@run_options
def explain(
    key: str,
    request: Request,
) -> None:
    """Explain KEY (train.lr) or a section (train).

    With a CONFIG or options it also shows the value there.
    """
    from megatron_run.planning import resolve
    from megatron_run.registry.importing import no_files_run
    from megatron_run_cli.reports import keys

    with no_files_run():
        run = resolve(request, plan_only=True) if request.configs or request.plugins or request.sets else None
    click.echo(keys.explain(key, run))


@config.command()
@click.option("--write", is_flag=True, help=f"Write it as {SCHEMA} into the current folder.")
def schema(*, write: bool) -> None:
    """Print a JSON schema of the configuration.

    It covers all installed plugins and is meant for editors. YAML that other commands write beside it names it.
    """
    from megatron_run_cli.reports.config_report import json_schema
    from megatron_run_cli.reports.keys import installed_plugins, without_engine

    installed = installed_plugins()
    lacking = [str(without_engine(installed.lacking))] if installed.lacking else []
    for notice in (*installed.notices, *lacking):
        tell(notice)
    content = json_schema(installed.plugins)
    if not write:
        print_json(content)
        return
    write_file(Path(SCHEMA), json.dumps(content, indent=2) + "\n")
    click.echo(f"written: {SCHEMA}; for editors let a configuration begin with")
    click.echo(schema_line(Path()), nl=False)


@config.command("from-megatron", epilog=example("config from-megatron pretrain.sh"))
@click.argument("script", type=click.Path(path_type=Path), metavar="SCRIPT")
def from_megatron(script: Path) -> None:
    """Translate a Megatron-LM launch script into a configuration.

    The script is read, never run. The YAML gives the flag behind each value, and at its end every flag that became no
    key, with the reason. Those flags are reported on standard error too.
    """
    from megatron_run.registry.choose_format import format_of_scripts

    translated = format_of_scripts("megatron", "config from-megatron").translate_script(script)
    for warning in translated.warnings:
        tell(warning)
    click.echo(schema_line(Path()) + translated.yaml, nl=False)
