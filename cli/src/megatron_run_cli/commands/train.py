"""``megatron-run [CONFIG...]``: train, or with ``--dry-run`` say what would be trained.

``megatron-run finetune FOLDER`` does so from the weights of a model that it imports.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from megatron_run.errors import NOT_BEGUN, CheckpointError, DataError, InputError, ended_with, refuse_input
from megatron_run_cli import RANK_VARIABLES
from megatron_run_cli.command_groups import example
from megatron_run_cli.completion import words as places
from megatron_run_cli.grammar import SavedStep, json_option, naming, run_options
from megatron_run_cli.output import print_json, tell, tell_error
from megatron_run_cli.streams import stand

if TYPE_CHECKING:
    from megatron_run.config.request import Request
    from megatron_run_engine.checkpoint.manifest import About
    from megatron_run_engine.launch import LaunchMode, RunResult

_FILE = click.Path(path_type=Path, dir_okay=False)
#: What stands on a terminal in the seconds in which there is nothing else to say.
_BEGINNING = "megatron-run: loading torch and the plugins, checking the run, starting it"


@click.command()
@run_options
@click.option(
    "--launch",
    "mode",
    type=click.Choice(["auto", "local", "torchrun", "slurm"]),
    default="auto",
    help="Source of the ranks; auto: torchrun or srun if started by them, else local [default: auto].",
)
@click.option(
    "--resume",
    type=SavedStep(),
    default="auto",
    metavar="auto|never|STEP",
    shell_complete=places.resumed,
    help="Saved step to resume from; auto: the newest; never: start anew [default: auto].",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Restart local ranks from the newest saved step after one was lost, at most N times [default: 0].",
)
@click.option("--extend", is_flag=True, help="Resume with more train.steps or train.samples.")
@click.option(
    "--allow-change",
    multiple=True,
    metavar="KEY[,KEY...]",
    shell_complete=places.keys,
    help="Resume with another value of these keys or sections, as train.lr,data; repeatable.",
)
@click.option(
    "--allow-plugin-change",
    type=click.Choice(["optimizer", "scaler"]),
    multiple=True,
    metavar="KIND",
    help="Drop the saved state of the optimizer or scaler; repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Check and print everything, train nothing.")
@click.option(
    "--device",
    metavar="NAME|FILE",
    help="With --dry-run: whether it fits a100, h100, ..., or a YAML file.",
    shell_complete=places.device,
)
@click.option("--svg", type=_FILE, metavar="FILE", help="With --dry-run: also draw the memory of each rank.")
@json_option
@click.option("--quiet", is_flag=True, help="Print errors only.")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors; those of ranks in their logs.")
def train(  # noqa: PLR0913  # one argument an option: so click calls it
    request: Request,
    mode: LaunchMode,
    *,
    resume: str,
    max_restarts: int,
    extend: bool,
    allow_change: tuple[str, ...],
    allow_plugin_change: tuple[str, ...],
    dry_run: bool,
    device: str | None,
    svg: Path | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> int:
    """Train a model.

    CONFIG is a YAML or JSON file, preset:NAME, or - for standard input [default: preset:laptop].
    """
    request = replace(
        request,
        resume=resume,
        extend=extend,
        allow_change=tuple(name.strip() for names in allow_change for name in names.split(",")),
        allow_plugin_change=allow_plugin_change,
    )
    if dry_run:
        from megatron_run.planning import resolve
        from megatron_run.planning.input_files import input_files
        from megatron_run_cli.reports.dry_run import dry_run_json, dry_run_text

        machine = None
        if device:
            from megatron_run_planner.devices import device_file, read_device

            machine = read_device(device)
        if svg:
            refuse_input(svg, "--svg", (*input_files(request), *([device_file(device)] if device else [])))
        run = resolve(request, plan_only=True)
        if as_json:
            print_json(dry_run_json(run, machine, svg))
        else:
            click.echo(dry_run_text(run, machine, svg))
        return 0
    if device or svg:
        raise InputError(f"{'--device' if device else '--svg'} is of a dry run", fix="add --dry-run")
    silent = (lambda _: None) if quiet else tell
    with ended_with(NOT_BEGUN):
        if not (quiet or as_json):
            _announce()
        from megatron_run_engine.launch import LaunchOptions, launch
    options = LaunchOptions(sys.argv[1:], quiet=quiet or as_json, debug=debug, max_restarts=max_restarts, tell=silent)
    result = launch(request, options, mode)
    if result.message:
        tell_error(result.message)
    if as_json:
        print_json(_as_json(result))
    return int(result.code)


def _announce() -> None:
    """Say what is done, before the seconds in which nothing else can be said; not of ranks that share a terminal."""
    if RANK_VARIABLES.isdisjoint(os.environ):
        stand(_BEGINNING)


def _as_json(result: RunResult) -> dict[str, object]:
    """The record for scripts of a run that has ended."""
    return {
        "exit_code": int(result.code),
        "retry": result.code.retry,
        "message": result.message,
        "folder": str(result.folder) if result.folder else None,
    }


#: What is trained unless a CONFIG or --set says otherwise: not long, with a small rate that falls to zero.
DEFAULTS: dict[str, dict[str, Any]] = {
    "train": {"steps": 500, "global_batch_size": 8, "lr": 2e-5, "lr_shape": "linear", "lr_warmup": "3%"},
    "eval": {"interval": "10%"},
    "checkpoint": {"interval": "20%"},
}
#: Tokens a sample where the model could read more, since memory grows with them. Learned positions fix their number.
LONGEST = 1024


def _finetune(  # one argument an option: so click calls it
    folder: Path, data: tuple[str, ...], task: str | None, seeds: int, configs: tuple[str, ...], **options: Any
) -> int:
    """Start from FOLDER's weights, which are imported first where they are another program's."""
    from megatron_run.config.request import Found, Request
    from megatron_run.config.values import nested
    from megatron_run.planning import check_keys
    from megatron_run.registry.discover import plain_name
    from megatron_run.registry.fetching import local_folder
    from megatron_run_engine.checkpoint.step_folder import find_step
    from megatron_run_engine.data.tokenizer_folder.record import TOKENIZER

    settings = (*options["sets"], *options["plugins"])
    _check_finetuning(data, task, seeds, settings)
    files = tuple(each for each in configs if each != "-")  # standard input is read once, by the training
    check_keys(Request(files, options["sets"], options["plugins"], options["nproc"], environment=os.environ))
    _check_data(
        data, texts=not (task or configs or any(setting.startswith(("data=", "data.use=")) for setting in settings))
    )
    checkpoints, step = find_step(_saved_steps(local_folder(folder, tell), folder))
    about, home = checkpoints.manifest(step).about, checkpoints.path.parent
    identity = about.identity
    model = nested(identity).get("model", {})
    longest = about.longest or LONGEST
    if model.get("position") == "rope":
        longest = min(longest, LONGEST)
    chosen = {
        **DEFAULTS,
        "model": {key: plain_name(value) if key == "use" else value for key, value in model.items()},
        "train": {**DEFAULTS["train"], "sequence_length": longest},
        "run": {"init_from": str(checkpoints.folder(step).absolute())},
        "data": {"use": "text", **({"paths": list(data)} if data else {})},
    }
    named = any(setting.startswith(("data.tokenizer=", "data=")) for setting in settings)
    if tokenizer := _tokenizer(about, home, named=named):
        chosen["data"]["tokenizer"] = tokenizer
    elif not named:
        raise InputError(
            f"{folder} has no {TOKENIZER}", why="its weights know no other ids", fix="add --set data.tokenizer=FILE"
        )
    if task is not None:
        from megatron_run_cli.commands.finetune_task import as_task

        as_task(chosen, task, data[0], settings)
    if not options["quiet"]:
        given = {setting.partition("=")[0] for setting in settings}
        keys = (f"{key}={value}" for key, value in chosen["train"].items() if f"train.{key}" not in given)
        tell(f"fine-tuning, unless you set otherwise, with train: {', '.join(keys)}")

    found = Found(chosen, f"what is saved in {checkpoints.folder(step)}")

    def start(*sets: str) -> int:
        names = {setting.partition("=")[0] for setting in sets}
        kept = (setting for setting in options["sets"] if setting.partition("=")[0] not in names)
        given = {**options, "sets": (*kept, *sets)}
        return int(train.callback(configs=(found, *configs), **given))  # type: ignore[misc]  # click types it as optional

    if seeds == 1:
        return start()
    from megatron_run_cli.commands.finetune_task import repeat

    return repeat(start, seeds, settings, quiet=options["quiet"])


def _tokenizer(about: About, home: Path, *, named: bool) -> str:
    """The tokenizer of the weights at ``home``; empty where nothing tells, or the user has ``named`` another one."""
    from megatron_run_engine.checkpoint.kept_files import tokenizer_of
    from megatron_run_engine.data.standalone_tokenizer import reads_bytes

    if reads_bytes(about.identity):
        return "bytes"
    try:
        found = tokenizer_of(home, about, about.tokenizer.name if about.tokenizer else "")
    except DataError:
        if not named:
            raise
        return ""
    return str(Path(found).absolute()) if found else ""


def _check_data(data: tuple[str, ...], *, texts: bool) -> None:
    """Raise :class:`DataError` for a name that matches nothing, before a model is imported for it.

    Without ``texts`` what is there is for a plugin to read.
    """
    from megatron_run_engine.data.documents import check_names, find_documents, require_texts

    with naming({"data.paths": "--data"}):
        check_names(data)
        if texts and data:
            require_texts([document.path for document in find_documents(data)])


def _check_finetuning(data: tuple[str, ...], task: str | None, seeds: int, settings: tuple[str, ...]) -> None:
    """Raise :class:`InputError` where what there is to train on does not fit."""
    if not data and not any("paths=" in setting for setting in settings):
        what = f"--task {task} reads a folder" if task else "there is nothing to train on"
        raise InputError(what, fix="add --data FOLDER" if task else "add --data FILE, as --data 'books/*.txt'")
    if task is not None and len(data) != 1:
        raise InputError(f"--task {task} reads one folder", fix="add --data FOLDER, with the files as published")
    if task is None and seeds > 1:
        raise InputError("--seeds repeats a task", fix="add --task, as --task mnli")


def _saved_steps(folder: Path, typed: Path) -> Path:
    """``folder`` if it has saved steps, else its model imported into ``runs``, once for the files that it has.

    The import is called as the user has ``typed`` it: a fetched folder may be called by a commit.
    """
    from megatron_run_engine.checkpoint.step_folder import LATEST_STEP, find_step
    from megatron_run_engine.formats.convert import import_model
    from megatron_run_engine.host.environments import find_world

    try:
        return find_step(folder)[0].folder(find_step(folder)[1])
    except CheckpointError:
        if not folder.is_dir():
            raise
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir())
    source = folder.resolve()
    called = source.name if typed == folder else re.split("[/:]", str(typed))[-1].partition("@")[0]
    name = f"{called}-{hashlib.sha256(repr((str(source), files)).encode()).hexdigest()[:8]}"
    target = Path("runs", "imported", name)
    if not (target / "checkpoints" / LATEST_STEP).is_file():
        if find_world(os.environ) is not None:
            raise InputError(
                f"{folder} is not imported",
                why="each rank would",
                fix=f"megatron-run import {quote(str(typed))} NEW, then NEW",
            )
        done = import_model(folder, target)
        for note in done.notes:
            tell(note)
        tell(f"imported {done.parameters:,} parameters from {typed}: {target}")
    return target


finetune = click.Command(
    "finetune",
    callback=_finetune,
    epilog=example("finetune gpt2 --data 'texts/*.txt'"),
    params=[
        click.Argument(["folder"], type=click.Path(path_type=Path)),
        click.Option(
            ["--data"],
            multiple=True,
            metavar="PATTERN",
            shell_complete=places.any_path,
            help="Text files, folders or patterns; repeatable. The same as --set data.paths=...",
        ),
        click.Option(
            ["--task"],
            metavar="TASK",
            shell_complete=places.finetune_task,
            help="Train BERT as the Megatron-LM paper does, on mnli, qqp, squad1, squad2 or race; --data names the "
            "folder of its published files.",
        ),
        click.Option(
            ["--seeds"],
            type=click.IntRange(min=1),
            default=1,
            metavar="N",
            help="Train on the task with N seeds, and print the median of each metric [default: 1].",
        ),
        *train.params,
    ],
    help="Train the model in FOLDER further, on other text.\n\nFOLDER is of another program, as of Hugging Face, or "
    "hf:ORG/NAME[@REVISION] of its Hub, and is imported into runs/imported; or it is an imported folder, a run folder "
    "or a saved step, with its tokenizer. CONFIG and the options are those of a training.",
)
