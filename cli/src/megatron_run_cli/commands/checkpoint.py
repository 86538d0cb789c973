"""``megatron-run checkpoint``, ``import`` and ``export``: saved steps, and models of other programs.

``checkpoint`` tells which steps were saved, whether they are intact, and what is in them. Formats are plugins.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from shlex import quote

import click

from megatron_run.errors import ExitCode, InputError
from megatron_run_cli.completion import words as places
from megatron_run_cli.grammar import Commands, debug_option, json_option, step_option
from megatron_run_cli.output import print_json, print_table, tell

_FOLDER = click.argument("folder", required=False, type=click.Path(path_type=Path), metavar="[FOLDER]")


@click.group(cls=Commands)
def checkpoint() -> None:
    """List, verify and inspect saved steps.

    FOLDER is a run folder, its checkpoints, or one saved step [default: runs/latest].
    """


@checkpoint.command("list")
@_FOLDER
@json_option
@debug_option
def list_(folder: Path | None, *, as_json: bool) -> None:
    """List saved steps; checks manifests and lengths, not contents."""
    from megatron_run_cli.reports import saved_steps
    from megatron_run_engine.checkpoint.step_folder import find_checkpoints

    checkpoints, _ = find_checkpoints(folder)
    findings = list(saved_steps.check(checkpoints))
    if as_json:
        steps = [finding.record for finding in findings]
        print_json({"folder": str(checkpoints.path), "latest": checkpoints.hint(), "steps": steps})
        return
    print_table(saved_steps.list_rows(findings, checkpoints.hint()))


@checkpoint.command()
@_FOLDER
@step_option("FOLDER", otherwise="all")
@json_option
@debug_option
def verify(folder: Path | None, *, step: int | None, as_json: bool) -> int:
    """Compare every byte with what was saved; code 5 if damaged."""
    from megatron_run_cli.reports import saved_steps
    from megatron_run_engine.checkpoint.step_folder import find_checkpoints

    checkpoints, named = find_checkpoints(folder)
    chosen = [each for each in (step, named) if each is not None][:1]
    findings = []
    for finding in saved_steps.check(checkpoints, chosen, thorough=True):
        findings.append(finding)
        if not as_json:
            click.echo(saved_steps.verify_text(finding))
    if as_json:
        print_json({"folder": str(checkpoints.path), "steps": [finding.record for finding in findings]})
    return int(ExitCode.DATA if any(finding.problem for finding in findings) else ExitCode.DONE)


@checkpoint.command()
@_FOLDER
@step_option("FOLDER")
@json_option
@debug_option
def inspect(folder: Path | None, *, step: int | None, as_json: bool) -> None:
    """Show counters, plugins, topology, files and tensors of a step."""
    from megatron_run_cli.reports import saved_steps
    from megatron_run_engine.checkpoint.step_folder import find_step

    checkpoints, chosen = find_step(folder, step)
    manifest = checkpoints.manifest(chosen)
    if as_json:
        print_json(manifest.model_dump(mode="json"))
    else:
        click.echo(saved_steps.inspect_text(manifest))


_PATH = click.Path(path_type=Path)


@click.command("import")
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
@debug_option
def import_(
    source: Path, folder: Path, *, name: str | None, trust_pickle: bool, base: Path | None, as_json: bool
) -> None:
    """Write the model at SOURCE as the new FOLDER: config.yaml and a saved step from which a run can start.

    SOURCE may hold adapters (LoRA) of a model that has been imported, --base. FORMAT is an installed plugin of kind
    format, as huggingface, megatron or distributed: `megatron-run plugins list format` shows them. It is NAME,
    DIST:NAME or a file ./mine.py.
    """
    from megatron_run_engine.formats.convert import import_model

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


@click.command("export")
@click.argument("words", nargs=-1, type=_PATH, metavar="[SOURCE] FOLDER")
@click.option(
    "--to",
    "name",
    required=True,
    metavar="FORMAT",
    help="Format to write, as huggingface.",
    shell_complete=places.formats,
)
@step_option("SOURCE")
@json_option
@debug_option
def export(words: tuple[Path, ...], *, name: str, step: int | None, as_json: bool) -> None:
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

    done = export_model(words[0] if len(words) == 2 else None, words[-1], name, step)
    if as_json:
        print_json(asdict(done))
    else:
        click.echo(f"{done.format}: step {done.step} of {done.source}: {done.folder}")
