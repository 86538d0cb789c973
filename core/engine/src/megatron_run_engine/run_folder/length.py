"""Whether a run that goes on still reaches the step from which it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from megatron_run.contracts.meaning import LENGTH
from megatron_run.errors import CheckpointError, InputError
from megatron_run.errors.wording import advice
from megatron_run.planning.batch_size import run_length
from megatron_run_engine.checkpoint.step_folder import CHECKPOINTS, Checkpoints
from megatron_run_engine.run_folder.changes import Change, allows

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.checkpoint.manifest import Manifest


def check_length(run: ResolvedRun, changed: Sequence[Change], home: Path) -> None:
    """Raise :class:`InputError` where ``run``, that of the folder ``home``, would end before the step it resumes from.

    No permission covers that: what was trained would be called another run's end. Whether the step can be read is for
    the ranks to find out.
    """
    lengths = [change for change in changed if change.key in LENGTH]
    checkpoints = Checkpoints(home / CHECKPOINTS)
    with suppress(CheckpointError):
        step = checkpoints.select(run.request.resume) if lengths else None
        if step is not None:
            _compare(run, lengths, checkpoints, checkpoints.manifest(step), home)


def _compare(
    run: ResolvedRun, lengths: Sequence[Change], checkpoints: Checkpoints, manifest: Manifest, home: Path
) -> None:
    train, counters, step = run.config.train, manifest.about.counters, manifest.about.step
    key, wanted, least = "train.steps", train.steps, step
    if train.samples is not None:
        key, wanted, least = "train.samples", train.samples, counters.get("samples", 0)
    if wanted is None or least <= wanted:
        return
    last, _ = run_length(train, 0, 0)
    older = max((each for each in checkpoints.steps() if each < last), default=None)
    source = quote(f"run.branch_from={home}@{older}")
    raise InputError(
        f"{key}={wanted} ends before step {step}, from which the run in {home} goes on",
        why=f"it has {least} {key.removeprefix('train.')} behind it",
        origin=str(run.origins.get(tuple(key.split(".")), "")),
        fix=advice(
            f"the least is --set {key}={least}{_permission(run, lengths, key, least)}",
            "" if older is None else f"to end there, branch in another run.folder: --set {source}",
        ),
    )


def _permission(run: ResolvedRun, lengths: Sequence[Change], key: str, least: int) -> str:
    """The option that the run needs to end at ``least`` by ``key``; empty where it needs none, or has it."""
    then = [change._replace(now=least) if change.key == key else change for change in lengths]
    names = [change.key for change in then if change.before != change.now and not allows(run.request, change)]
    return f" --allow-change {','.join(names)}" if names else ""
