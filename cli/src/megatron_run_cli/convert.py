"""``megatron-run import`` and ``export``: models of other programs, and for them. Formats are plugins."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from megatron_run_cli.options import debug_option, json_option
from megatron_run_cli.output import print_json, tell

_PATH = click.Path(path_type=Path)


@click.command("import")
@click.argument("source", type=_PATH)
@click.argument("folder", type=_PATH)
@click.option("--from", "name", metavar="FORMAT", help="Format of SOURCE [default: detected from its files].")
@click.option("--trust-pickle", is_flag=True, help="Execute SOURCE's pickles; only if you trust their writer.")
@json_option
@debug_option
def import_(source: Path, folder: Path, *, name: str | None, trust_pickle: bool, as_json: bool) -> None:
    """Write the model at SOURCE as the new FOLDER: config.yaml and a saved step from which a run can start.

    FORMAT is an installed plugin of kind format, as huggingface, megatron or distributed: `megatron-run plugins list
    format` shows them. It is NAME, DIST:NAME or a file ./mine.py.
    """
    from megatron_run_engine.formats.convert import import_model

    done = import_model(source, folder, name, trust_pickle=trust_pickle)
    for note in done.notes:
        tell(note)
    if as_json:
        print_json(asdict(done))
        return
    moments = f", with {', '.join(done.moments)}" if done.moments else ""
    click.echo(f"{done.format}: {done.parameters:,} parameters{moments}, step {done.step}: {done.folder}")
    click.echo(f"to train from it: megatron-run {done.folder}/config.yaml YOURS.yaml --set run.init_from={done.folder}")


@click.command("export")
@click.argument("words", nargs=-1, type=_PATH, metavar="[SOURCE] FOLDER")
@click.option("--to", "name", required=True, metavar="FORMAT", help="Format to write, as huggingface.")
@click.option(
    "--step", type=click.IntRange(min=0), metavar="N", help="Number of the step [default: SOURCE's, else the newest]."
)
@json_option
@debug_option
def export(words: tuple[Path, ...], *, name: str, step: int | None, as_json: bool) -> None:
    """Write a saved step as the new FOLDER, in another format.

    SOURCE is a run folder, its checkpoints, or one saved step [runs/latest]. FORMAT is an installed plugin of kind
    format, as huggingface or distributed: `megatron-run plugins list format` shows them.
    """
    if not 1 <= len(words) <= 2:
        raise click.UsageError(f"expected [SOURCE] FOLDER, got {len(words)} words")
    from megatron_run_engine.formats.convert import export_model

    done = export_model(words[0] if len(words) == 2 else None, words[-1], name, step)
    if as_json:
        print_json(asdict(done))
    else:
        click.echo(f"{done.format}: step {done.step} of {done.source}: {done.folder}")
