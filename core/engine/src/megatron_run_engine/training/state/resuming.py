"""Going on from a saved step: rank 0 chooses it, all ranks verify it, and only then does anything change."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_run.contracts import MASTER
from megatron_run.errors import CheckpointError, DataError
from megatron_run_engine.checkpoint.collectives import on_all_ranks, on_rank0
from megatron_run_engine.checkpoint.files import unwatched
from megatron_run_engine.checkpoint.reader import Reader
from megatron_run_engine.checkpoint.step_folder import verify_files
from megatron_run_engine.run_folder.identity import differing_keys, identity
from megatron_run_engine.training.numbers import Progress
from megatron_run_engine.training.state.plugin_lock import changes, optimizer_upgrade, scaler_state
from megatron_run_engine.training.state.upgrading import UpgradingReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from megatron_run.contracts import ReadState
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.checkpoint.manifest import About, DataRecord, Manifest
    from megatron_run_engine.checkpoint.step_folder import Checkpoints
    from megatron_run_engine.training.build import Assembly
    from megatron_run_engine.training.state.upgrading import Upgrade


#: Each thread hashes some 2 GB a second.
_MOST_FILES = 8


class Findings(NamedTuple):
    """What a saved step says to the run of now.

    How far it had come; what the scaler is to load, None: it starts anew; and what makes an older optimizer's fields
    those of now, None: they are.
    """

    progress: Progress
    scaler: Mapping[str, Any] | None
    upgrade: Upgrade | None


def resume(
    run: ResolvedRun, assembly: Assembly, checkpoints: Checkpoints, ranks: Ranks, data: DataRecord, word: str
) -> Progress:
    """Load the step that ``word`` means (:func:`choose`), of a run on ``data``; how far it had come. Collective.

    What is wrong on any rank is raised on all of them: before anything of ``assembly`` has changed, but for what can
    only be seen when values are read.
    """
    step = json.loads(on_rank0(ranks, lambda: json.dumps(choose(word, checkpoints))))
    if step is None:
        return Progress()
    activity = assembly.context.groups.activity
    manifest = on_all_ranks(ranks, lambda: _verify(checkpoints, step, ranks, activity.heartbeat))
    found = on_all_ranks(ranks, lambda: _check(run, manifest.about, data))
    if ranks.rank == 0:
        for line in changes(manifest.about, run.plugins):
            assembly.context.log.warning("%s", line)
    anew = "optimizer" in run.request.allow_plugin_change
    reader = Reader(checkpoints.folder(step), manifest)
    upgrading = UpgradingReader(reader, found.upgrade) if found.upgrade else reader
    reading = Reading(upgrading, str(run.one("optimizer")), anew=anew)
    begun = any(tensor.keys() != {MASTER} for tensor in manifest.tensors.values())
    on_all_ranks(ranks, lambda: _load(assembly, reading, found.scaler, begun=begun))
    return found.progress


def choose(word: str, checkpoints: Checkpoints) -> int | None:
    """The step that ``--resume word`` means: the newest, one by its number, or None, which is the start of the run."""
    if word == "never":
        return None
    return checkpoints.newest() if word == "auto" else int(word)


def _verify(checkpoints: Checkpoints, step: int, ranks: Ranks, heartbeat: Callable[[], None]) -> Manifest:
    again = "to start again: --resume never"
    with checkpoints.offering_older(step, lambda older: f"to go on from step {older}: --resume {older}", again):
        return verify_share(checkpoints, step, ranks, heartbeat)


def files_at_once() -> int:
    """How many files a rank hashes at once: as many as it has threads, up to what a fast disk delivers."""
    return min(_MOST_FILES, torch.get_num_threads())


def verify_share(
    checkpoints: Checkpoints, step: int, ranks: Ranks, heartbeat: Callable[[], None] = unwatched
) -> Manifest:
    """The manifest of ``step``. Each rank reads some of the files, so that every file is read once.

    ``heartbeat`` is called while it reads, by several threads.
    """
    manifest = checkpoints.manifest(step)
    mine = sorted(manifest.files)[ranks.rank :: ranks.size]
    verify_files(checkpoints.folder(step), manifest, mine, files_at_once(), heartbeat)
    return manifest


def _check(run: ResolvedRun, saved: About, data: DataRecord) -> Findings:
    """Whether the step is of this run, of these data, and of plugins that can read it."""
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
    upgrade = optimizer_upgrade(saved, run.plugins)
    return Findings(Progress(**saved.counters, losses=saved.losses), scaler_state(saved, run.plugins, allowed), upgrade)


def load(into: Callable[[ReadState], None], read: ReadState) -> None:
    """Load what ``read`` gives ``into`` an optimizer, and then raise what the first read that failed raised.

    Nothing is raised while it loads: it brings what it has read to the other ranks, which would wait for one that left.
    From the first failure on it reads zeros.
    """
    failures: list[Exception] = []

    def read_or_zeros(name: str, field: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        if not failures:
            try:
                return read(name, field, starts, sizes)
            except Exception as error:  # whatever it is: the others wait
                failures.append(error)
        return torch.zeros(sizes)

    into(read_or_zeros)
    if failures:
        raise failures[0]


class Reading:
    """How ``optimizer`` looks its state up; ``anew``: what was not saved starts from zeros."""

    def __init__(self, reader: Reader | UpgradingReader, optimizer: str, *, anew: bool) -> None:
        self._reader, self._optimizer, self._anew = reader, optimizer, anew

    def __call__(self, name: str, field: str, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """The box. Raises :class:`CheckpointError` where it was not saved and cannot start from zeros."""
        known = self._reader.fields(name)
        if field in known or not known:
            return self._reader.read(name, field, starts, sizes)
        if self._anew:
            return torch.zeros(sizes)
        raise CheckpointError(
            f"what was saved has no {field} of {name}, which {self._optimizer} needs",
            why=f"it has {', '.join(sorted(known))}",
            fix="choose the optimizer that saved it, or start its state anew: --allow-plugin-change optimizer",
        )


def _load(assembly: Assembly, read: Reading, scaler: Mapping[str, Any] | None, *, begun: bool) -> None:
    """Masters and moments, box by box; then the loss scale.

    Not ``begun``: the step was saved before the first update, by a rule that begins with a state of its own.
    """
    load(assembly.optimizer.load_state if begun else assembly.optimizer.load_weights, read)
    if scaler is not None:
        assembly.scaler.load_state_dict(scaler)
