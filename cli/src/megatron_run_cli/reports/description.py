"""``plugins info``: what a plugin says about itself, as plain data that can be printed or sent through a pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_run.config.values import typed
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_cli.reports.keys import KeyInfo, model_keys


@dataclass(frozen=True)
class Description:
    """A plugin that was imported, described: where from, what it provides and wants, its options."""

    kind: str
    name: str
    distribution: str
    version: str
    location: str
    api: int
    provides: tuple[str, ...]
    requires: tuple[str, ...]
    conflicts: tuple[str, ...]
    suggests: Mapping[str, str]
    suggests_with: Mapping[str, Mapping[str, str]]
    options: tuple[KeyInfo, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Description:
        """Read the form that ``dataclasses.asdict`` writes, after a trip through JSON."""
        words = {field: tuple(data[field]) for field in ("provides", "requires", "conflicts")}
        return cls(**{**data, **words, "options": tuple(KeyInfo(**row) for row in data["options"])})


def describe(plugin: Plugin) -> Description:
    """Everything there is to say about a loaded plugin."""
    info = plugin.info
    return Description(
        kind=plugin.kind,
        name=plugin.name,
        distribution=plugin.distribution,
        version=plugin.version,
        location=plugin.location,
        api=info.api,
        provides=tuple(sorted(info.provides)),
        requires=tuple(sorted(info.requires)),
        conflicts=tuple(sorted(info.conflicts)),
        suggests=_typed_values(info.suggests),
        suggests_with={option: _typed_values(values) for option, values in info.suggests_with.items()},
        options=tuple(model_keys(plugin.options_model, ())),
    )


def _typed_values(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: typed(value) for key, value in values.items()}
