"""Values that a plugin decides when a run begins, such as its date, and that the run then keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_run.config.merge import ConfigSource, merge
from megatron_run.config.origin import Key, Origin, dotted, section_of
from megatron_run.config.run_home import run_and_step
from megatron_run.files.safe_folder import SafeFolder

if TYPE_CHECKING:
    from megatron_run.registry.loaded_plugin import Plugin

#: The origin of such a value.
START = Origin("suggestion", "the start of the run")


def apply_decided(merged: ConfigSource, plugins: Mapping[str, tuple[Plugin, ...]]) -> ConfigSource:
    """Add the values that plugins decide for keys that the user left open.

    A run that goes on has those of its ``run.json``, and a branch those of the run that it leaves; one that was begun
    without such a key stays without.
    """
    decided = ConfigSource()
    for plugin in (plugin for stack in plugins.values() for plugin in stack):
        for option, decide in plugin.info.decides.items():
            key = (section_of(plugin.kind), option)
            if key in merged.values:
                continue
            begun = begun_with(merged)
            value = decide() if begun is None else begun.get(dotted(key))
            if value is not None:
                decided.put(key, value, START)
    return merge((decided, merged))


def begun_with(merged: ConfigSource) -> Mapping[str, Any] | None:
    """The identity of the run that goes on, or is branched; None for a run that begins."""
    for key in (("run", "folder"), ("run", "branch_from")):
        place = _text(merged, key)
        if not place:
            continue
        for home in dict.fromkeys((place, run_and_step(place)[0])):
            record = SafeFolder(Path(home).expanduser()).read_json("run.json")
            identity = None if record is None else record.get("identity")
            if isinstance(identity, dict):
                return identity
    return None


def _text(merged: ConfigSource, key: Key) -> str:
    value = merged.values.get(key)
    return "" if value is None or value.data is None else str(value.data)
