"""``megatron-run plugins``: what is installed, what it is, why it was chosen, and how to make one."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from megatron_run.errors import ExitCode, InputError
from megatron_run_cli.options import debug_option, json_option, run_options
from megatron_run_cli.output import print_json, print_table, tell

if TYPE_CHECKING:
    from megatron_run.config.request import Request
    from megatron_run_cli.reports.description import Description


@click.group()
def plugins() -> None:
    """List, inspect, create and check plugins."""


@plugins.command("list")
@click.argument("kind", required=False)
@click.option("--check", is_flag=True, help="Also import each plugin, in its own process.")
@json_option
@debug_option
def list_(kind: str | None, *, check: bool, as_json: bool) -> None:
    """List installed plugins of KIND, or all, without importing them."""
    from megatron_run.registry.choose import check_kind
    from megatron_run_cli.reports.listing import list_plugins

    wanted = check_kind(kind, "plugins list") if kind else None
    listing = list_plugins(check=check)
    found = [each for each in listing.plugins if wanted in (None, each.kind)]
    if as_json:
        print_json({"plugins": [{**vars(each), "state": each.state} for each in found], "notices": listing.notices})
        return
    print_table([(each.kind, each.name, each.distribution, each.version, each.state, each.problem) for each in found])
    if not found:
        tell(f"no plugin of kind {wanted} is installed")
    for notice in listing.notices:
        tell(notice)


@plugins.command()
@click.argument("plugin", metavar="KIND=NAME")
@json_option
@debug_option
def info(plugin: str, *, as_json: bool) -> None:
    """Show what a plugin provides and needs, and its options."""
    from megatron_run_cli.reports.listing import plugin_info

    kind, equals, name = plugin.partition("=")
    if not equals:
        raise InputError(f"{plugin!r} names no plugin", fix="write KIND=NAME, as in: plugins info schedule=interleaved")
    description = plugin_info(kind, name)
    if as_json:
        print_json(description)
    else:
        _print_description(description)


@plugins.command()
@click.argument("kind")
@run_options
@json_option
@debug_option
def why(
    kind: str,
    request: Request,
    *,
    as_json: bool,
) -> None:
    """Show which plugin of KIND a run would choose, and why."""
    from megatron_run.contracts.plugin import check_run_kind
    from megatron_run.planning import resolve
    from megatron_run_cli.reports.listing import why as explain

    kind = check_run_kind(kind, "plugins why")
    run = resolve(request, plan_only=True)
    candidates = explain(kind, run.plugins[kind])
    if as_json:
        print_json(candidates)
        return
    print_table(
        [
            ("chosen" if each.chosen else "", each.plugin.name, each.plugin.distribution, each.reason)
            for each in candidates
        ]
    )


@plugins.command()
@click.argument("kind")
@click.argument("name")
@click.option("--folder", type=click.Path(path_type=Path), help="New folder [default: named like the distribution].")
@json_option
@debug_option
def new(kind: str, name: str, folder: Path | None, *, as_json: bool) -> None:
    """Write a package with a working plugin and its test."""
    from megatron_run_cli.scaffold import new as write

    package = write(kind, name, folder)
    if as_json:
        print_json(package)
        return
    for file in package.files:
        click.echo(package.folder / file)
    click.echo(f"try it:      megatron-run plugins check {quote(str(package.folder))}")
    click.echo(f"install it:  pip install -e {quote(f'{package.folder}[test]')}")
    click.echo(f"test it:     pytest {quote(str(package.folder))}")
    click.echo(f"choose it:   {package.command}")


@plugins.command()
@click.argument("target", metavar="KIND=NAME|FOLDER|FILE")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set an option of the plugin; repeatable.")
@json_option
@debug_option
def check(target: str, sets: tuple[str, ...], *, as_json: bool) -> int:
    """Run the conformance suite on a plugin, package folder or file."""
    from megatron_run_testing.conformance import check as run_suite

    reports = run_suite(target, sets)
    if as_json:
        print_json(reports)
    else:
        for report in reports:
            click.echo(f"{report.plugin} ({report.source})")
            print_table([(f"  {each.state}", each.name, each.message) for each in report.results])
    return int(ExitCode.DONE if all(report.passed for report in reports) else ExitCode.PLUGIN)


def _print_description(description: Description) -> None:
    click.echo(f"{description.kind}={description.name}")
    wishes = {"": description.suggests, **{f" with {w}": more for w, more in description.suggests_with.items()}}
    suggests = (f"{key}={value}{condition}" for condition, more in wishes.items() for key, value in more.items())
    facts = {
        "from": f"{description.distribution} {description.version}".strip() or description.location,
        "at": description.location,
        "api": str(description.api),
        "provides": ", ".join(description.provides),
        "requires": ", ".join(description.requires),
        "conflicts": ", ".join(description.conflicts),
        "suggests": ", ".join(suggests),
    }
    print_table([(f"  {name}", text) for name, text in facts.items() if text])
    if description.options:
        click.echo("options")
        rows = description.options
        print_table([(f"  {each.name}", each.type, each.default_text, each.bounds, each.description) for each in rows])
