"""The command ``megatron-run losses``: the last losses of every run in a folder.

This module is imported whenever somebody asks which commands there are. Import what is heavy in a command's body.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from megatron_run.errors import InputError
from megatron_run.hookspecs import hookimpl
from megatron_run_cli.command_groups import example
from megatron_run_cli.grammar import json_option
from megatron_run_cli.output import print_json, print_table


@click.command(epilog=example("losses runs"))
@click.argument("folder", type=click.Path(path_type=Path))
@json_option
def command(folder: Path, *, as_json: bool) -> None:
    """List the last losses of each run in FOLDER."""
    files = sorted(folder.glob("*/eval.jsonl"))
    if not files:
        raise InputError(f"no run in {folder} was evaluated", fix="name a folder of runs, as runs")
    lines = [json.loads(file.read_text(encoding="utf-8").splitlines()[-1]) for file in files]
    found = [{"run": file.parent.name, "loss": line["loss"]} for file, line in zip(files, lines, strict=True)]
    if as_json:
        print_json(found)
    else:
        print_table([("run", "loss"), *((each["run"], f"{each['loss']:.4f}") for each in found)])


@hookimpl
def megatron_run_commands() -> dict[str, click.Command]:
    """The commands by the names of their entry points in pyproject.toml."""
    return {"losses": command}
