"""Which plugins a checkpoint was made with, and whether the plugins of now can go on from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.manifest import PluginRecord
from megatron_run_engine.training.state.upgrading import Upgrade, find_upgrade

if TYPE_CHECKING:
    from megatron_run.registry.loaded_plugin import Plugin
    from megatron_run_engine.checkpoint.manifest import About

#: Kinds whose state is saved. That of an optimizer is logical: another optimizer reads it, field by field.
LOGICAL, OWN = "optimizer", "scaler"

Plugins = Mapping[str, Sequence["Plugin"]]


def plugin_records(plugins: Plugins) -> dict[str, tuple[PluginRecord, ...]]:
    """The lock: the plugins of every kind, with the versions of what they save."""
    return {kind: tuple(_record(plugin) for plugin in many) for kind, many in plugins.items()}


def _record(plugin: Plugin) -> PluginRecord:
    return PluginRecord(
        name=plugin.name,
        distribution=plugin.distribution,
        version=plugin.version,
        state_version=plugin.info.state_version,
    )


def changes(saved: About, plugins: Plugins) -> list[str]:
    """One line for each kind whose plugins are others than those that saved."""
    lines = []
    for kind, records in plugin_records(plugins).items():
        before, now = (" + ".join(each.name for each in many) for many in (saved.plugins.get(kind, ()), records))
        if before != now:
            lines.append(f"step {saved.step} was saved with {kind}={before}, going on with {kind}={now}")
    return lines


def scaler_state(saved: About, plugins: Plugins, allowed: Collection[str]) -> Mapping[str, Any] | None:
    """What the scaler of now is to load: moved to its version where it is older; None: it starts anew.

    Raises :class:`CheckpointError` when another scaler wrote it, unless that is ``allowed``.
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
    """What to make of the fields that an older version of the same optimizer saved; None: they are read as they are.

    Raises :class:`CheckpointError` when they mean something else by now and it cannot read them.
    """
    (plugin,) = plugins[LOGICAL]
    (writer,) = saved.plugins.get(LOGICAL, (None,))
    return None if writer is None or writer.name != plugin.name else find_upgrade(writer, plugin, saved.step)
