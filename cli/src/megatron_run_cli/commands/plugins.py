"""``megatron-run plugins``: what is installed, what it is, why it was chosen, and how to make one."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from megatron_run.contracts.plugin import COMMAND, check_kind
from megatron_run.errors import ExitCode, InputError
from megatron_run.registry.choose import choose
from megatron_run.registry.commands import next_words
from megatron_run.registry.discover import scan
from megatron_run_cli.command_groups import Commands, example, is_own, obstacle
from megatron_run_cli.commands.new_package import OFFERED, write_package
from megatron_run_cli.commands.plugin_search import search
from megatron_run_cli.completion import words as places
from megatron_run_cli.grammar import json_option, run_options
from megatron_run_cli.output import print_json, print_table, tell

if TYPE_CHECKING:
    from megatron_run.config.request import Request
    from megatron_run_cli.reports.command_report import CommandDescription
    from megatron_run_cli.reports.keys import Description


@click.group(cls=Commands)
def plugins() -> None:
    """List, find, inspect, create and check plugins."""


plugins.add_command(search)


@plugins.command("list")
@click.argument("kind", required=False, shell_complete=places.offered_kinds)
@click.option("--check", is_flag=True, help="Also import each plugin, in its own process.")
@json_option
@click.pass_context
def list_(context: click.Context, kind: str | None, *, check: bool, as_json: bool) -> None:
    """List installed plugins and commands, all or those of KIND.

    None is imported. KIND command has the commands.
    """
    from megatron_run_cli.reports.listing import list_plugins

    wanted = _listed_kind(kind) if kind else None
    listing = list_plugins(check=check, obstacle=partial(obstacle, context.find_root().command))
    found = [each for each in listing.plugins if wanted in (None, each.kind)]
    if as_json:
        print_json({"plugins": [{**vars(each), "state": each.state} for each in found], "notices": listing.notices})
        return
    print_table(
        [
            (each.kind, each.name, each.distribution, each.version, each.state, each.problem or each.refusal)
            for each in found
        ]
    )
    if not found:
        tell(f"no plugin of kind {wanted} is installed")
    for notice in listing.notices:
        tell(notice)


def _listed_kind(typed: str) -> str:
    """The kind that is to be listed. Raises :class:`InputError`, with what to type for a plugin's name."""
    from megatron_run.registry.bare_names import called

    if found := () if typed.replace("_", "-") in OFFERED else called(typed, scan()):
        raise InputError(f"{typed!r} is no kind", why="plugins are called so", fix=f"type: plugins info {found[0]}")
    return check_kind(typed, "plugins list", OFFERED)


def _kind_of(typed: str) -> str:
    """The kind that is meant by its name, or by an installed plugin of it. Raises :class:`InputError`."""
    if typed.replace("_", "-") in OFFERED:
        return typed
    kind, _, name = _named(typed, "plugins why").partition("=")
    return kind if kind == COMMAND else choose(scan(), kind, name, "plugins why").kind


def _named(typed: str, origin: str) -> str:
    """``KIND=NAME`` of what is typed so, or by its name alone. Raises :class:`InputError`."""
    from megatron_run.registry.bare_names import with_kind

    return typed if "=" in typed else with_kind(typed, scan(), origin)


@plugins.command(epilog=example("plugins info schedule=1f1b"))
@click.argument("plugin", metavar="[KIND=]NAME", shell_complete=places.plugin_name)
@json_option
@click.pass_context
def info(context: click.Context, plugin: str, *, as_json: bool) -> None:
    """Show what a plugin provides and needs, and its options.

    Of command=NAME it shows what that does and who brings it. A NAME that one kind has is enough.
    """
    from megatron_run_cli.reports.listing import plugin_info

    kind, _, name = _named(plugin, "plugins info").partition("=")
    if kind == COMMAND:
        from megatron_run_cli.reports.command_report import describe_command

        about = describe_command(name, context.find_root())
        if as_json:
            print_json(about)
        else:
            _print_command(about)
        return
    description = plugin_info(kind, name)
    if as_json:
        print_json(description)
    else:
        _print_description(description)


@plugins.command(epilog=example("plugins why schedule"))
@click.argument("kind", metavar="KIND|NAME", shell_complete=places.run_kinds)
@run_options
@json_option
@click.pass_context
def why(
    context: click.Context,
    kind: str,
    request: Request,
    *,
    as_json: bool,
) -> None:
    """Show which plugin of KIND a run would choose, and why.

    Of KIND command, which commands are found. The NAME of a plugin stands for its kind.
    """
    from megatron_run.contracts.plugin import check_run_kind
    from megatron_run.planning import resolve
    from megatron_run.registry.importing import no_files_run
    from megatron_run_cli.reports.listing import command_candidates
    from megatron_run_cli.reports.listing import why as explain

    kind = _kind_of(kind)
    if kind == COMMAND:
        candidates = command_candidates(scan(), partial(obstacle, context.find_root().command))
    else:
        kind = check_run_kind(kind, "plugins why")
        with no_files_run():
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


@plugins.command(epilog=example("plugins new schedule mine"))
@click.argument("kind", shell_complete=places.offered_kinds)
@click.argument("name")
@click.option("--folder", type=click.Path(path_type=Path), help="New folder [default: named like the distribution].")
@json_option
@click.pass_context
def new(context: click.Context, kind: str, name: str, folder: Path | None, *, as_json: bool) -> None:
    """Write a package with a working plugin or command, and its test.

    KIND command makes a command. A command in a group is named with a dot: data.mine is typed as data mine.
    """
    if kind == COMMAND:
        name = ".".join(name.split())
        _check_place(context.find_root().command, name)
    package = write_package(kind, name, folder)
    if as_json:
        print_json(package)
        return
    for file in package.files:
        click.echo(package.folder / file)
    click.echo(f"try it:      megatron-run plugins check {quote(str(package.folder))}")
    click.echo(f"install it:  pip install -e {quote(f'{package.folder}[test]')}")
    click.echo(f"test it:     pytest {quote(str(package.folder))}")
    click.echo(f"{'type it:  ' if kind == COMMAND else 'choose it:'}   {package.command}")


@plugins.command(epilog=example("plugins check ./mine.py"))
@click.argument("target", metavar="KIND=NAME|FOLDER|FILE|PACKAGE", shell_complete=places.plugin_or_path)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set an option of the plugin; repeatable.")
@click.option("--compose", is_flag=True, help="Instead train random configurations with the plugin, on 1 to 4 ranks.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="With --compose: how many [default: 20].")
@click.option("--seed", type=int, metavar="N", help="With --compose: of the choices [default: 1].")
@json_option
@click.pass_context
def check(
    context: click.Context,
    target: str,
    sets: tuple[str, ...],
    *,
    compose: bool,
    count: int | None,
    seed: int | None,
    as_json: bool,
) -> int:
    """Run the conformance suite on a plugin, package folder or file."""
    from megatron_run_testing.conformance import check as run_suite

    if compose:
        return _compose(target, sets, 20 if count is None else count, 1 if seed is None else seed, as_json=as_json)
    if count is not None or seed is not None:
        raise InputError(
            "--count and --seed are of --compose", fix=f"add --compose: plugins check --compose {quote(target)}"
        )
    reports = run_suite(target, sets, partial(obstacle, context.find_root().command))
    if as_json:
        print_json(reports)
    else:
        for report in reports:
            click.echo(f"{report.plugin} ({report.source})")
            print_table([(f"  {each.state}", each.name, each.message) for each in report.results])
    return int(ExitCode.DONE if all(report.passed for report in reports) else ExitCode.PLUGIN)


def _compose(target: str, sets: tuple[str, ...], count: int, seed: int, *, as_json: bool) -> int:
    """Compare random configurations with the single process; show the simplest that differ, and what to type."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from megatron_run_testing.conformance.composition import check_composition

    found = check_composition(target, sets, count, seed, tell)
    if as_json:
        print_json(found)
    else:
        for each in found:
            click.echo(each)
            for difference in each.differences:
                click.echo(f"\n{difference.composition}: {'; '.join(difference.faults)}")
                for command in difference.commands:
                    click.echo(f"  {command}")
    return int(ExitCode.DONE if all(each.passed for each in found) else ExitCode.PLUGIN)


def _print_description(description: Description) -> None:
    click.echo(f"{description.kind}={description.name}")
    wishes = {"": description.suggests, **{f" with {w}": more for w, more in description.suggests_with.items()}}
    suggests = (f"{key}={value}{condition}" for condition, more in wishes.items() for key, value in more.items())
    facts = {
        "does": description.summary,
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


def _print_command(about: CommandDescription) -> None:
    click.echo(f"command={about.name}")
    facts = {
        "from": f"{about.distribution} {about.version}",
        "at": about.location,
        "type": about.typed,
        "does": about.about,
        "example": about.example,
    }
    print_table([(f"  {name}", text) for name, text in facts.items() if text])
    if about.commands:
        click.echo("commands")
        print_table([(f"  {name}", text) for name, text in about.commands.items()])


def _check_place(program: click.Command, name: str) -> None:
    """Raise :class:`InputError` where nobody could type the new command ``name``, a dotted one."""
    catalog, place = scan(), name.split(".")
    if is_own(program, place):
        raise InputError(f"command={name} is taken by megatron-run itself", fix="choose another name")
    if catalog.offering(COMMAND, name):
        return  # which is refused where packages are written
    after = ", ".join(next_words(catalog, place))
    if why := obstacle(program, catalog, place) or (after and f"it is a group, with {after}"):
        raise InputError(f"command={name} could not be typed", why=why, fix="choose another name")
