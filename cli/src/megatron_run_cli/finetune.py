"""``megatron-run finetune FOLDER``: from a model of another program to a run that starts from it, in one command."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import click

from megatron_run.errors import CheckpointError, InputError
from megatron_run_cli.output import tell
from megatron_run_cli.train import train

#: What is trained unless a CONFIG or --set says otherwise: not long, with a small rate that falls to zero.
DEFAULTS: dict[str, dict[str, Any]] = {
    "train": {"steps": 500, "global_batch_size": 8, "lr": 2e-5, "lr_shape": "linear", "lr_warmup": "3%"},
    "eval": {"interval": "10%"},
    "checkpoint": {"interval": "20%"},
}
#: Tokens a sample where the model could read more, since memory grows with them. Learned positions fix their number.
LONGEST = 1024


def _finetune(folder: Path, data: tuple[str, ...], configs: tuple[str, ...], **options: Any) -> int:
    """Start from FOLDER's weights, which are imported first where they are another program's."""
    from megatron_run.registry.discover import plain_name
    from megatron_run_engine.checkpoint.step_folder import find_step
    from megatron_run_engine.data.tokenizer import TOKENIZER

    checkpoints, step = find_step(_ours(folder))
    identity, home = checkpoints.manifest(step).about.identity, checkpoints.path.parent
    model = {key.removeprefix("model."): value for key, value in identity.items() if key.startswith("model.")}
    longest = identity.get("train.sequence_length") or LONGEST
    if model.get("position") == "rope":
        longest = min(longest, LONGEST)
    chosen = {
        **DEFAULTS,
        "model": {key: plain_name(value) if key == "use" else value for key, value in model.items()},
        "train": {**DEFAULTS["train"], "sequence_length": longest},
        "run": {"init_from": str(checkpoints.folder(step).absolute())},
        "data": {"use": "text", "paths": list(data)},
    }
    if (home / TOKENIZER).is_file():
        chosen["data"]["tokenizer"] = str(home.absolute() / TOKENIZER)
    elif not any(word.startswith(("data.tokenizer=", "data=")) for word in (*options["sets"], *options["plugins"])):
        raise InputError(
            f"{folder} has no {TOKENIZER}", why="its weights know no other ids", fix="add --set data.tokenizer=FILE"
        )
    if not options["quiet"]:
        keys = ", ".join(f"{key}={value}" for key, value in chosen["train"].items())
        tell(f"fine-tuning, unless you set otherwise, with train: {keys}")
    return int(train.callback(configs=(chosen, *configs), **options))  # type: ignore[misc]  # click types it as optional


def _ours(folder: Path) -> Path:
    """``folder`` if it has saved steps, else its model imported into ``runs``, once for the files that it has."""
    from megatron_run_engine.checkpoint.step_folder import LATEST, find_step
    from megatron_run_engine.formats.convert import import_model
    from megatron_run_engine.launch.environments import find_world

    try:
        return find_step(folder)[0].folder(find_step(folder)[1])
    except CheckpointError:
        if not folder.is_dir():
            raise
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir())
    source = folder.resolve()
    name = f"{source.name}-{hashlib.sha256(repr((str(source), files)).encode()).hexdigest()[:8]}"
    target = Path("runs", "imported", name)
    if not (target / "checkpoints" / LATEST).is_file():
        if find_world(os.environ) is not None:
            raise InputError(
                f"{folder} is not imported", why="each rank would", fix=f"megatron-run import {folder} NEW, then NEW"
            )
        done = import_model(folder, target)
        for note in done.notes:
            tell(note)
        tell(f"imported {done.parameters:,} parameters from {folder}: {target}")
    return target


finetune = click.Command(
    "finetune",
    callback=_finetune,
    params=[
        click.Argument(["folder"], type=click.Path(path_type=Path)),
        click.Option(
            ["--data"],
            multiple=True,
            metavar="PATTERN",
            help="Text files, folders or patterns; repeatable.",
            required=True,
        ),
        *train.params,
    ],
    help="Train the model in FOLDER further, on other text.\n\nFOLDER is of another program, as of Hugging Face, and "
    "is imported into runs/imported; or it is an imported folder, a run folder or a saved step, with its tokenizer. "
    "CONFIG and the options are those of a training.",
)
