"""Which plugins a checkpoint was made with, and whether the plugins of now can go on from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_run.checkpoint.manifest import PluginRecord
from megatron_run.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_run.checkpoint.manifest import About
    from megatron_run.registry.plugin import Plugin

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
    return _upgraded(saved.scaler, writer, plugin, saved.step)


def check_optimizer(saved: About, plugins: Plugins) -> None:
    """Raise :class:`CheckpointError` when the same optimizer wrote fields that mean something else by now."""
    (plugin,) = plugins[LOGICAL]
    (writer,) = saved.plugins.get(LOGICAL, (None,))
    if writer is not None and writer.name == plugin.name and writer.state_version != plugin.info.state_version:
        raise _other_version(writer, plugin, saved.step)


def _upgraded(state: Mapping[str, Any], writer: PluginRecord, plugin: Plugin, step: int) -> Mapping[str, Any]:
    if writer.state_version == plugin.info.state_version:
        return state
    if writer.state_version > plugin.info.state_version or plugin.info.upgrade_state is None:
        raise _other_version(writer, plugin, step)
    return plugin.info.upgrade_state(state, writer.state_version)


def _other_version(writer: PluginRecord, plugin: Plugin, step: int) -> CheckpointError:
    return CheckpointError(
        f"step {step} holds state of version {writer.state_version} of {plugin}",
        why=f"{plugin.source} writes and reads version {plugin.info.state_version}",
        fix=f"install {writer.source}",
    )
