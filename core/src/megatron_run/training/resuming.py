"""Going on from a saved step: rank 0 chooses it, all ranks verify it, and only then does anything change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from megatron_run.checkpoint.ranks import all_do, first_does
from megatron_run.checkpoint.reader import Reader
from megatron_run.checkpoint.step_folder import verify_files
from megatron_run.errors import CheckpointError, DataError
from megatron_run.run_folder.identity import differing_keys, identity
from megatron_run.training.numbers import Progress
from megatron_run.training.plugin_lock import changes, check_optimizer, scaler_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from megatron_run.checkpoint.manifest import About, DataRecord, Manifest
    from megatron_run.checkpoint.ranks import Ranks
    from megatron_run.checkpoint.step_folder import Checkpoints
    from megatron_run.contracts import ReadState
    from megatron_run.resolve import ResolvedRun
    from megatron_run.training.build import Assembly


def resume(
    run: ResolvedRun, assembly: Assembly, checkpoints: Checkpoints, ranks: Ranks, data: DataRecord, word: str
) -> Progress:
    """Load the step that ``word`` means (:func:`choose`), of a run on ``data``; how far it had come. Collective.

    What is wrong on any rank is raised on all of them, before anything of ``assembly`` has changed.
    """
    step = json.loads(first_does(ranks, lambda: json.dumps(choose(word, checkpoints))))
    if step is None:
        return Progress()
    manifest = all_do(ranks, lambda: _verify(checkpoints, step, ranks))
    progress, scaler = all_do(ranks, lambda: _check(run, manifest.about, data))
    if ranks.rank == 0:
        for line in changes(manifest.about, run.plugins):
            assembly.context.log.warning("%s", line)
    # A rule that has not made an update yet has no state, and starts from zeros.
    anew = not progress.scheduled or "optimizer" in run.request.allow_plugin_change
    read = _reading(run, Reader(checkpoints.folder(step), manifest), anew=anew)
    all_do(ranks, lambda: _load(assembly, read, scaler))
    return progress


def choose(word: str, checkpoints: Checkpoints) -> int | None:
    """The step that ``--resume word`` means: the newest, one by its number, or None, which is the start of the run."""
    if word == "never":
        return None
    return checkpoints.newest() if word == "auto" else int(word)


def _verify(checkpoints: Checkpoints, step: int, ranks: Ranks) -> Manifest:
    try:
        return verify_share(checkpoints, step, ranks)
    except CheckpointError as error:
        older = [each for each in checkpoints.steps() if each < step]
        error.fix = error.fix or (
            f"to go on from step {older[-1]}: --resume {older[-1]}" if older else "--resume never"
        )
        raise


def verify_share(checkpoints: Checkpoints, step: int, ranks: Ranks) -> Manifest:
    """The manifest of ``step``. Each rank reads some of the files, so that every file is read once."""
    manifest = checkpoints.manifest(step)
    verify_files(checkpoints.folder(step), manifest, sorted(manifest.files)[ranks.rank :: ranks.size])
    return manifest


def _check(run: ResolvedRun, saved: About, data: DataRecord) -> tuple[Progress, Mapping[str, Any] | None]:
    """Whether the step is of this run, of these data, and of plugins that can read it; what the scaler is to load."""
    allowed = run.request.allow_plugin_change
    differing = differing_keys(saved.identity, identity(run), allowed)
    if differing:
        why = ", ".join(differing)
        raise CheckpointError(f"step {saved.step} belongs to another run", why=why, fix="give the same values")
    if saved.data != data:
        counts = f"{saved.data.samples} samples then, {data.samples} now"
        raise DataError(
            f"the training data is not what it was when step {saved.step} was saved",
            why=counts if saved.data.samples != data.samples else "as many samples, with other contents",
            fix="give the same data, or start again: --resume never",
        )
    check_optimizer(saved, run.plugins)
    return Progress(**saved.counters, losses=saved.losses), scaler_state(saved, run.plugins, allowed)


def _reading(run: ResolvedRun, reader: Reader, *, anew: bool) -> ReadState:
    """How the optimizer looks its state up; ``anew``: what was not saved starts from zeros."""

    def read(name: str, field: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        known = reader.fields(name)
        if field in known or not known:
            return reader.read(name, field, starts, sizes)
        if anew:
            return torch.zeros(sizes)
        raise CheckpointError(
            f"what was saved has no {field} of {name}, which {run.one('optimizer')} needs",
            why=f"it has {', '.join(sorted(known))}",
            fix="choose the optimizer that saved it, or start its state anew: --allow-plugin-change optimizer",
        )

    return read


def _load(assembly: Assembly, read: ReadState, scaler: Mapping[str, Any] | None) -> None:
    """Masters and moments, box by box; then the loss scale."""
    assembly.optimizer.load_state(read)
    if scaler is not None:
        assembly.scaler.load_state_dict(scaler)
