"""``megatron-run doctor``: what this machine and this environment can do."""

from __future__ import annotations

import click

from megatron_run_cli.options import debug_option, json_option
from megatron_run_cli.output import print_json, print_table


@click.command()
@json_option
@debug_option
def doctor(*, as_json: bool) -> int:
    """Check this machine, its environment and all plugins."""
    from megatron_run_engine.launch.examine import examine

    findings = examine()
    if as_json:
        print_json(findings)
    else:
        print_table([(each.state, each.topic, each.text) for each in findings])
    return max(int(each.exit_code) for each in findings)
