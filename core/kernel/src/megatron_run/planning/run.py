"""The resolved run: everything that is decided before a process group exists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_run.config.origin import KIND_SECTIONS
from megatron_run.config.request import Request
from megatron_run.config.yaml_text import yaml_text

if TYPE_CHECKING:
    from megatron_run.config.origin import Key, Origin
    from megatron_run.contracts.actions import Place
    from megatron_run.contracts.schema import Config
    from megatron_run.contracts.topology import Sizes
    from megatron_run.pipeline.plan import Plan
    from megatron_run.registry.loaded_plugin import Plugin


@dataclass(frozen=True, repr=False)
class ResolvedRun:
    """A checked run.

    ``plugins`` by kind, in the order in which they stack or watch; ``layout`` is where each layer lives, in model
    order; ``plans`` maps every microbatch count of the run to its verified plan; ``origins`` says where each key
    (``("train", "lr")``) came from, defaults left out; ``notices`` are one line each. ``request`` is what it was
    resolved from.
    """

    config: Config
    plugins: Mapping[str, tuple[Plugin, ...]]
    sizes: Sizes
    layout: tuple[Place, ...]
    plans: Mapping[int, Plan]
    origins: Mapping[Key, Origin]
    notices: tuple[str, ...]
    request: Request = field(default_factory=Request)

    @property
    def unloaded(self) -> tuple[Plugin, ...]:
        """The plugins that could not be loaded without the engine; empty for a run that can be trained."""
        return tuple(plugin for many in self.plugins.values() for plugin in many if not plugin.loaded)

    def one(self, kind: str) -> Plugin:
        """The plugin of a kind that takes exactly one."""
        (plugin,) = self.plugins[kind]
        return plugin

    def __repr__(self) -> str:
        chosen = ", ".join(f"{kind}={'+'.join(each.name for each in many)}" for kind, many in self.plugins.items())
        return f"ResolvedRun({chosen}, world={self.sizes.world})"


def to_yaml(run: ResolvedRun) -> str:
    """A configuration file that resolves to ``run``: every key with its value."""
    return yaml_text(sections(run))


def sections(run: ResolvedRun) -> dict[str, Any]:
    """The configuration as plain data, with the options of a kind beside its ``use`` as a user writes them."""
    data = run.config.model_dump(mode="json")
    for section in KIND_SECTIONS:
        if section in data:
            data[section] = {"use": data[section]["use"], **data[section]["options"]}
    return data


def leaves(data: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every key of nested mappings with its value, in order; an empty mapping is a value."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value
