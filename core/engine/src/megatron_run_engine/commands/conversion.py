"""``megatron-run import`` and ``export``: models of other programs, by plugins of kind format."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from shlex import quote

import click

from megatron_run.errors import InputError
from megatron_run_cli.command_groups import example
from megatron_run_cli.completion import words as places
from megatron_run_cli.grammar import json_option, step_option
from megatron_run_cli.output import print_json, tell

_PATH = click.Path(path_type=Path)


@click.command("import", epilog=example("import gpt2 imported"))
@click.argument("source", type=_PATH)
@click.argument("folder", type=_PATH)
@click.option(
    "--from",
    "name",
    metavar="FORMAT",
    help="Format of SOURCE [default: detected from its files].",
    shell_complete=places.formats,
)
@click.option("--trust-pickle", is_flag=True, help="Execute SOURCE's pickles; only if you trust their writer.")
@click.option(
    "--base",
    type=_PATH,
    metavar="MODEL",
    help="Imported folder or run whose weights the adapters at SOURCE adapt [default: the folder that they name].",
)
@json_option
def import_(
    source: Path, folder: Path, *, name: str | None, trust_pickle: bool, base: Path | None, as_json: bool
) -> None:
    """Write the model at SOURCE as the new FOLDER, to train it.

    FOLDER gets a config.yaml and a saved step. SOURCE is a folder, or hf:ORG/NAME[@REVISION] of the Hugging Face
    Hub. It may hold adapters (LoRA) of a model that has been imported, --base. FORMAT is an installed plugin of
    kind format, as huggingface, megatron or distributed: `megatron-run plugins list format` shows them. It is NAME,
    DIST:NAME or a file ./mine.py.
    """
    from megatron_run.registry.fetching import local_folder
    from megatron_run_engine.formats.convert import import_model

    source, base = local_folder(source, tell), None if base is None else local_folder(base, tell)
    done = import_model(source, folder, name, trust_pickle=trust_pickle, base=base)
    for note in done.notes:
        tell(note)
    if as_json:
        print_json(asdict(done))
        return
    click.echo(f"{done.format}: {done.parameters:,} parameters, step {done.step}: {done.folder}")
    if done.moments:
        kept = f"the optimizer's state ({', '.join(done.moments)}) is kept for an export"
        click.echo(f"{kept}; training starts from the weights alone, at step 1")
        sections = "with the sections data and train in YOURS.yaml"
        click.echo(f"to train it, {sections}: megatron-run {quote(f'{done.folder}/config.yaml')} YOURS.yaml")
    else:
        click.echo(f"to fine-tune it: megatron-run finetune {quote(str(done.folder))} --data YOURS.txt")


@click.command("export", epilog=example("export runs/latest out --to huggingface"))
@click.argument("words", nargs=-1, type=_PATH, metavar="[SOURCE] FOLDER")
@click.option(
    "--to",
    "name",
    required=True,
    metavar="FORMAT",
    help="Format to write, as huggingface.",
    shell_complete=places.formats,
)
@click.option("--push", metavar="ORG/NAME", help="Then send FOLDER to the Hugging Face Hub, with a model card.")
@step_option("SOURCE")
@json_option
def export(words: tuple[Path, ...], *, name: str, push: str | None, step: int | None, as_json: bool) -> None:
    """Write a saved step as the new FOLDER, in another format.

    SOURCE is a run folder, its checkpoints, or one saved step [runs/latest]. FORMAT is an installed plugin of kind
    format, as huggingface, peft or distributed: `megatron-run plugins list format` shows them.
    """
    if not 1 <= len(words) <= 2:
        raise click.UsageError(f"expected [SOURCE] FOLDER, got {len(words)} words")
    if len(words) == 1 and (words[0] / "run.json").exists():
        fix = f"add a new folder: megatron-run export {quote(str(words[0]))} FOLDER --to {name}"
        raise InputError(f"{words[0]} is a run, and FOLDER is where its model goes", fix=fix)
    from megatron_run_engine.formats.convert import export_model

    done = export_model(words[0] if len(words) == 2 else None, words[-1], name, step, push)
    if as_json:
        print_json(asdict(done))
    else:
        click.echo(f"{done.format}: step {done.step} of {done.source}: {done.folder}")
        if done.pushed:
            click.echo(f"pushed: {done.pushed}")
