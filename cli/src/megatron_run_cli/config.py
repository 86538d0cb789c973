"""``megatron-run config``: what a run is configured to do, and what can be configured."""

from __future__ import annotations

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
    from megatron_run.resolve import resolve
    from megatron_run.resolve.show import show as text
    from megatron_run.resolve.show import show_json

    run = resolve(request)
    if as_json:
        print_json(show_json(run))
    else:
        click.echo(text(run), nl=False)


@config.command()
@click.argument("key")
@run_options
@debug_option
def explain(
    key: str,
    request: Request,
) -> None:
    """Say what KEY (train.lr) or a whole section (train) means; with a CONFIG or options, also its value there."""
    from megatron_run.resolve import resolve
    from megatron_run.resolve.explain import explain as text

    run = resolve(request) if request.configs or request.plugins or request.sets else None
    click.echo(text(key, run))


@config.command()
@debug_option
def schema() -> None:
    """Print the JSON schema of a configuration file that may use any installed plugin; for editors."""
    from megatron_run.resolve.explain import installed_plugins
    from megatron_run.resolve.explain import schema as make

    plugins, notices = installed_plugins()
    for notice in notices:
        tell(notice)
    print_json(make(plugins))
