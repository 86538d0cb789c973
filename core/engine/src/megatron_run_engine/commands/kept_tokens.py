"""``megatron-run data cache``: the tokens that data=text keeps for later starts."""

from __future__ import annotations

import click

from megatron_run.errors import DataError
from megatron_run_cli.grammar import json_option
from megatron_run_cli.output import print_json, print_table


@click.command()
@click.option("--prune", is_flag=True, help="Remove what no run has opened for --days.")
@click.option("--days", type=click.FloatRange(min=0), metavar="N", help="With --prune [default: 30]; 0 for all.")
@json_option
def cache(*, prune: bool, days: float | None, as_json: bool) -> None:
    """List the tokens that data=text keeps for later starts.

    With --prune, old ones are removed.
    """
    from megatron_run_engine.data.token_cache import KEPT_DAYS, entries, remove_old

    if days is not None and not prune:
        raise click.UsageError("--days goes with --prune")
    try:
        removed = remove_old(KEPT_DAYS if days is None else days) if prune else []
        kept = entries()
    except OSError as cause:
        raise DataError("the cache cannot be read", why=str(cause)) from cause
    if as_json:
        print_json({"entries": kept, "removed": removed})
        return
    if prune:
        click.echo(f"removed {len(removed)}, {sum(entry.size for entry in removed) / 1e6:,.1f} MB")
    rows = [(f"{each.size / 1e6:,.1f} MB", _age(each.days), each.tokenizer, each.text) for each in kept]
    print_table([("size", "last used", "tokenizer", "text"), *rows] if rows else [("nothing is kept",)])


def _age(days: float) -> str:
    return f"{days:.0f} days ago" if days >= 2 else f"{days * 24:.0f} h ago" if days * 24 >= 1 else "now"
