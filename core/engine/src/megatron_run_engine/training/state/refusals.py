"""Decides whether a run may resume from a checkpoint whose files are intact, and how its plugins read the saved state.

:func:`accept` asks the questions in order: is it this run, are these its data, can the scaler and the optimizer read
their state? The first "no" is a :class:`CheckpointError` or :class:`DataError` that tells what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_run.errors import CheckpointError, DataError
from megatron_run_engine.checkpoint.manifest import PluginRecord
from megatron_run_engine.run_folder.identity import differing_keys, identity
from megatron_run_engine.training.numbers import Progress

if TYPE_CHECKING:
    from megatron_run.planning import ResolvedRun
    from megatron_run.registry.loaded_plugin import Plugin
    from megatron_run_engine.checkpoint.manifest import About, DataRecord

#: Kinds whose state is saved. An optimizer's state is logical: any optimizer reads it, field by field. A scaler's state
#: is its own.
LOGICAL, OWN = "optimizer", "scaler"

Plugins = Mapping[str, Sequence["Plugin"]]
#: Converts the state that an older version of a plugin saved to the current version's state.
Upgrade = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class Accepted(NamedTuple):
    """What a run takes over from an accepted checkpoint.

    ``scaler`` is the state to load, None to start with a new one. ``upgrade`` converts an older optimizer's state, None
    if it is current.
    """

    progress: Progress
    scaler: Mapping[str, Any] | None
    upgrade: Upgrade | None


def accept(run: ResolvedRun, saved: About, data: DataRecord) -> Accepted:
    """Accept the checkpoint ``saved`` for ``run``, which trains on ``data``, or raise why not."""
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
    return Accepted(Progress(**saved.counters, losses=saved.losses), scaler_state(saved, run.plugins, allowed), upgrade)


def scaler_state(saved: About, plugins: Plugins, allowed: Collection[str]) -> Mapping[str, Any] | None:
    """Return the state that the scaler is to load, upgraded if it is older; None to start with a new one.

    Raises :class:`CheckpointError` if another scaler wrote it, unless the kind is ``allowed`` to change.
    """
    (plugin,) = plugins[OWN]
    (writer,) = saved.plugins.get(OWN, (None,))
    if writer is None or not saved.scaler:
        return None
    if writer.name != plugin.name:
        if OWN in allowed:
            return None
        raise CheckpointError(
            f"step {saved.step} holds the state of {OWN}={writer.name}, which {plugin} cannot read",
            why=f"it was written by {writer.source}",
            fix=f"choose {OWN}={writer.name}, or start its state anew: --allow-plugin-change {OWN}",
        )
    upgrade = find_upgrade(writer, plugin, saved.step)
    return saved.scaler if upgrade is None else upgrade(saved.scaler)


def optimizer_upgrade(saved: About, plugins: Plugins) -> Upgrade | None:
    """Return the conversion of an older optimizer's state; None if it is current or another optimizer's.

    Raises :class:`CheckpointError` if the current version cannot read it.
    """
    (plugin,) = plugins[LOGICAL]
    (writer,) = saved.plugins.get(LOGICAL, (None,))
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
        except Exception as error:  # third-party code: name the plugin, whatever it raised
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
            for plugin in many
        )
        for kind, many in plugins.items()
    }


def changes(saved: About, plugins: Plugins) -> list[str]:
    """Return one line for each kind whose plugins differ from those that saved."""
    lines = []
    for kind, records in plugin_records(plugins).items():
        before, now = (" + ".join(each.name for each in many) for many in (saved.plugins.get(kind, ()), records))
        if before != now:
            lines.append(f"step {saved.step} was saved with {kind}={before}, resuming with {kind}={now}")
    return lines
