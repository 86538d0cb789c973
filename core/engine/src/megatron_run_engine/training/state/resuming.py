"""Resumes from a checkpoint: rank 0 chooses the step, all ranks verify and accept it, and only then read it.

:func:`accept` decides whether the run may resume from a step whose files are intact, in this order: is it this run, are
these its data, can the optimizer and the scaler read their state, does its progress fit the step? The first "no" is a
:class:`CheckpointError` or :class:`DataError` that tells what to do about it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import ValidationError

from megatron_run.config.values import nested
from megatron_run.contracts import MASTER
from megatron_run.contracts.schema import TrainSection
from megatron_run.errors import CheckpointError, DataError
from megatron_run.errors.wording import advice
from megatron_run.planning.batch_size import run_length
from megatron_run.planning.learning_rate import LearningRate
from megatron_run_engine.checkpoint.collectives import on_all_ranks, on_rank0
from megatron_run_engine.checkpoint.files import no_heartbeat
from megatron_run_engine.checkpoint.manifest import AdaptersRecord, PluginRecord
from megatron_run_engine.checkpoint.reader import Reader, Rehearsal
from megatron_run_engine.checkpoint.step_folder import verify_files
from megatron_run_engine.run_folder.changes import (
    Change,
    allows_other_data,
    find_changes,
    find_refusal,
    identity,
    with_added_options,
    with_moved_tokenizer,
)
from megatron_run_engine.training.numbers import Progress
from megatron_run_engine.training.state.adapting import fill_frozen, open_base
from megatron_run_engine.training.state.data_files import changed_files
from megatron_run_engine.training.state.programs import program_changes
from megatron_run_engine.training.state.reading import StateReader, Upgrade, UpgradingReader, load
from megatron_run_engine.training.state.same_model import check_shapes, check_tokenizer

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run.registry.loaded_plugin import Plugin
    from megatron_run_engine.checkpoint.collectives import Ranks
    from megatron_run_engine.checkpoint.manifest import About, DataRecord, Manifest
    from megatron_run_engine.checkpoint.step_folder import Checkpoints
    from megatron_run_engine.training.build import Assembly


#: Threads that hash files. Each hashes some 2 GB/s, so more would outrun the disk.
_MOST_FILES = 8


class Resumed(NamedTuple):
    """Where a run goes on: the ``progress`` of the saved step in ``folder``, None for a run that begins.

    ``changes`` are the configuration keys that were others when it was saved. ``adapters`` name what a step adapts.
    """

    progress: Progress
    folder: Path | None = None
    changes: tuple[Change, ...] = ()
    adapters: AdaptersRecord | None = None


def resume(
    run: ResolvedRun,
    assembly: Assembly,
    checkpoints: Checkpoints,
    ranks: Ranks,
    data: DataRecord,
    step: int,
    decided: Collection[str] | None,
    verified: Manifest | None = None,
) -> Resumed:
    """Load ``step`` into ``assembly``. Collective. ``decided`` is that of :func:`accept`.

    The files are verified first, unless they were, against the manifest ``verified``. An error on any rank is raised on
    all of them. All errors but those of reading values are raised before any state of ``assembly`` has changed.
    """
    heartbeat = assembly.context.groups.activity.heartbeat
    manifest = verified or on_all_ranks(ranks, lambda: _verify(checkpoints, step, ranks, heartbeat))
    words = on_all_ranks(ranks, lambda: check_tokenizer(run, checkpoints, step))
    base = on_all_ranks(ranks, lambda: open_base(run, assembly, manifest.about, checkpoints.folder(step), ranks))
    accepted = on_all_ranks(ranks, lambda: accept(run, manifest.about, data, checkpoints.home, decided, words))
    if ranks.rank == 0:
        keys, plugins = map(str, accepted.changes), plugin_changes(manifest.about, run.plugins)
        code = program_changes(manifest.about, run)
        files = changed_files(checkpoints.home, manifest.about.data, data)
        contents = [f"of the training data {files}"] if files else []
        for line in (*plugins, *code, *keys, *contents, *rate_change(run, manifest.about, accepted)):
            assembly.context.log.warning("%s", line)
    reader = Reader(checkpoints.folder(step), manifest)
    on_all_ranks(ranks, lambda: check_shapes(run, assembly, reader, checkpoints.folder(step)))
    read = _state_reader(run, reader, accepted.upgrade)
    on_all_ranks(ranks, lambda: _load(assembly, read, accepted.scaler, updated=_updated(manifest)))
    on_all_ranks(ranks, lambda: fill_frozen(assembly, base.reader))
    return Resumed(accepted.progress, checkpoints.folder(step), accepted.changes, base.record)


def _state_reader(run: ResolvedRun, reader: Reader, upgrade: Upgrade | None) -> StateReader:
    """A reader of state for the optimizer of ``run``."""
    return StateReader(
        UpgradingReader(reader, upgrade) if upgrade else reader,
        str(run.one("optimizer")),
        zeros_if_missing="optimizer" in run.request.allow_plugin_change,
    )


def _updated(manifest: Manifest) -> bool:
    """Whether the rule had made its first update: before, one with state of its own saves masters only.

    It must then start as in a first step.
    """
    return any(tensor.keys() != {MASTER} for tensor in manifest.tensors.values())


def files_read(run: ResolvedRun, assembly: Assembly, manifest: Manifest, ranks: Ranks) -> set[str]:
    """The files of the step of ``manifest`` that this rank reads. Collective.

    The optimizer alone knows its boxes: it loads zeros, and must be loaded again.
    """
    rehearsal = Rehearsal(Path(), manifest)
    read = _state_reader(run, rehearsal, optimizer_upgrade(manifest.about, run.plugins))
    on_all_ranks(ranks, lambda: _load(assembly, read, None, updated=_updated(manifest)))
    return rehearsal.files


def choose_on_rank0(choice: str, checkpoints: Checkpoints, ranks: Ranks) -> int | None:
    """Return what :meth:`Checkpoints.select` returns on rank 0. Collective."""
    step: int | None = json.loads(on_rank0(ranks, lambda: json.dumps(checkpoints.select(choice))))
    return step


def _verify(checkpoints: Checkpoints, step: int, ranks: Ranks, heartbeat: Callable[[], None]) -> Manifest:
    again = "to start again: --resume never"
    with checkpoints.offering_older(step, lambda older: f"to resume from step {older}: --resume {older}", again):
        return verify_share(checkpoints, step, ranks, heartbeat)


def files_at_once() -> int:
    """Return how many files a rank hashes or writes at once: one per thread, up to what a fast disk delivers."""
    return min(_MOST_FILES, torch.get_num_threads())


def verify_share(
    checkpoints: Checkpoints, step: int, ranks: Ranks, heartbeat: Callable[[], None] = no_heartbeat
) -> Manifest:
    """Return the manifest of ``step``, after verifying this rank's share of its files.

    The files are dealt to the ranks, so that each is read once. ``heartbeat`` is called meanwhile, by several threads.
    """
    manifest = checkpoints.manifest(step)
    share = sorted(manifest.files)[ranks.rank :: ranks.size]
    verify_files(checkpoints.folder(step), manifest, share, files_at_once(), heartbeat, fast=True)
    return manifest


def _load(assembly: Assembly, read: StateReader, scaler: Mapping[str, Any] | None, *, updated: bool) -> None:
    """Load master weights and optimizer state (the weights only unless ``updated``), then the scaler's state."""
    load(assembly.optimizer.load_state if updated else assembly.optimizer.load_weights, read)
    if scaler is not None:
        assembly.scaler.load_state_dict(scaler)


#: Kinds whose state is saved. An optimizer's state is logical: any optimizer reads it, field by field. A scaler's state
#: is its own.
OPTIMIZER, SCALER = "optimizer", "scaler"

Plugins = Mapping[str, Sequence["Plugin"]]


class Accepted(NamedTuple):
    """The values that a run takes over from an accepted checkpoint.

    ``scaler`` is the state to load, None to start with a new one. ``upgrade`` converts an older optimizer's state, None
    if it is current. ``changes`` are the configuration keys that differ, with permission.
    """

    progress: Progress
    scaler: Mapping[str, Any] | None
    upgrade: Upgrade | None
    changes: tuple[Change, ...] = ()


def accept(
    run: ResolvedRun,
    saved: About,
    data: DataRecord,
    source: Path,
    decided: Collection[str] | None = (),
    words: Sequence[Change] = (),
) -> Accepted:
    """Accept the checkpoint ``saved`` for ``run``, which trains on ``data``, or raise why not.

    ``words`` is the change of the vocabulary, by which the same files have other samples. ``decided`` are keys that an
    attempt since then was allowed to change; None stands for all that can change, as in a branch of the run at
    ``source``, which has a configuration of its own.
    """
    allowed = run.request.allow_plugin_change
    now = identity(run)
    found = find_changes(with_moved_tokenizer(with_added_options(saved.identity, run), now, source), run, allowed)
    refusal = find_refusal(found, run.request, source, [each.key for each in found] if decided is None else decided)
    if refusal is not None:
        what = f"step {saved.step} belongs to another run"
        raise CheckpointError(what, why=refusal.why, fix=refusal.fix)
    contents: tuple[Change, ...] = ()
    if not saved.data.fits(data) and not (words and saved.data.files == data.files):
        contents = (Change.of_content("data", _content(saved.data), _content(data)),)
    if contents and not allows_other_data(run.request, found):
        counts = f"{saved.data.samples} samples then, {data.samples} now"
        files, more = changed_files(source, saved.data, data), saved.data.samples != data.samples
        raise DataError(
            f"the training data is not what it was when step {saved.step} was saved",
            why=advice(files, counts if more else "" if files else "as many samples, with other contents"),
            fix="give the same data, go on with other data: --allow-change data, or start again: --resume never",
        )
    upgrade = optimizer_upgrade(saved, run.plugins)
    scaler = scaler_state(saved, run.plugins, allowed)
    progress = Progress.restored(saved.step, saved.counters, saved.losses)
    return Accepted(progress, scaler, upgrade, (*found, *words, *contents))


def _content(data: DataRecord) -> str:
    return data.files or data.sha256


def rate_change(run: ResolvedRun, saved: About, accepted: Accepted) -> list[str]:
    """Return a line if the changes move the learning rate of the next step; its schedule may depend on the length."""
    progress, train = accepted.progress, _train_section(saved)
    if train is None or not accepted.changes:
        return []
    rates = []
    for section in (train, run.config.train):
        _, total = run_length(section, progress.step, progress.samples)
        rates.append(LearningRate.from_config(section, total).at(progress.scheduled))
    before, now = rates
    if before == now:
        return []
    return [f"the learning rate of step {progress.step + 1} would have been {before:.3g} and is {now:.3g}"]


def _train_section(saved: About) -> TrainSection | None:
    """Return the section ``train`` with which ``saved`` was saved, None if this version cannot read it."""
    try:
        return TrainSection(**nested(saved.identity).get("train", {}))
    except ValidationError:
        return None


def scaler_state(saved: About, plugins: Plugins, allowed: Collection[str]) -> Mapping[str, Any] | None:
    """Return the state that the scaler is to load, upgraded if it is older; None to start with a new one.

    Raises :class:`CheckpointError` if another scaler wrote it, unless the kind is ``allowed`` to change.
    """
    (plugin,) = plugins[SCALER]
    (writer,) = saved.plugins.get(SCALER, (None,))
    if writer is None or not saved.scaler:
        return None
    if writer.name != plugin.name:
        if SCALER in allowed:
            return None
        raise CheckpointError(
            f"step {saved.step} holds the state of {SCALER}={writer.name}, which {plugin} cannot read",
            why=f"it was written by {writer.source}",
            fix=f"choose {SCALER}={writer.name}, or start its state anew: --allow-plugin-change {SCALER}",
        )
    upgrade = find_upgrade(writer, plugin, saved.step)
    return saved.scaler if upgrade is None else upgrade(saved.scaler)


def optimizer_upgrade(saved: About, plugins: Plugins) -> Upgrade | None:
    """Return the conversion of an older optimizer's state; None if it is current or another optimizer's.

    Raises :class:`CheckpointError` if the current version cannot read it.
    """
    (plugin,) = plugins[OPTIMIZER]
    (writer,) = saved.plugins.get(OPTIMIZER, (None,))
    # Another optimizer's fields have logical names: those that both know are read, the others refused or begun anew.
    return None if writer is None or writer.name != plugin.name else find_upgrade(writer, plugin, saved.step)


def find_upgrade(writer: PluginRecord, plugin: Plugin, step: int) -> Upgrade | None:
    """Return the conversion of the state that ``writer``, a version of ``plugin``, saved; None if it is current.

    Raises :class:`CheckpointError` if ``plugin`` cannot read that version. The conversion raises it too if it fails.
    """
    before, info = writer.state_version, plugin.info
    if before == info.state_version:
        return None
    if before > info.state_version or info.upgrade_state is None:
        raise CheckpointError(
            f"step {step} holds state of version {before} of {plugin}",
            why=f"{plugin.source} writes and reads version {info.state_version}",
            fix=f"install {writer.source}",
        )
    upgrade_state = info.upgrade_state

    def upgrade(state: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return upgrade_state(state, before)
        except (Exception, SystemExit) as error:  # third-party code: name the plugin, whatever it raised
            raise CheckpointError(
                f"{plugin} of {plugin.source} cannot read the state of version {before} in step {step}",
                why=f"its upgrade_state raised {type(error).__name__}: {error}",
                fix=f"install {writer.source}",
            ) from error

    return upgrade


def plugin_records(plugins: Plugins) -> dict[str, tuple[PluginRecord, ...]]:
    """Return the plugins of every kind as the manifest records them, with the versions of their state."""
    return {
        kind: tuple(
            PluginRecord(
                name=plugin.name,
                distribution=plugin.distribution,
                version=plugin.version,
                state_version=plugin.info.state_version,
            )
            for plugin in stack
        )
        for kind, stack in plugins.items()
    }


def plugin_changes(saved: About, plugins: Plugins) -> list[str]:
    """Return one line for each kind whose plugins differ from those that saved."""
    lines = []
    for kind, records in plugin_records(plugins).items():
        before, now = (" + ".join(each.name for each in stack) for stack in (saved.plugins.get(kind, ()), records))
        if before != now:
            lines.append(f"step {saved.step} was saved with {kind}={before}, resuming with {kind}={now}")
    return lines
