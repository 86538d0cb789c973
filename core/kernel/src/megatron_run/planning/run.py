"""The resolved run: everything that is decided before a process group exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_run.config.request import Request
from megatron_run.planning.describe import describe, to_json
from megatron_run.planning.digest import digest
from megatron_run.planning.show import to_yaml

if TYPE_CHECKING:
    from megatron_run.config.origin import Key, Origin
    from megatron_run.contracts.actions import Place
    from megatron_run.contracts.schema import Config
    from megatron_run.contracts.topology import Sizes
    from megatron_run.pipeline.plan import Plan
    from megatron_run.registry.load import Plugin


@dataclass(frozen=True, repr=False)
class ResolvedRun:
    """What will run, checked.

    ``plugins`` by kind, in the order in which they stack or watch; ``layout`` is where each layer lives, in model
    order; ``plans`` maps every microbatch count of the run to its verified plan; ``origins`` says where each key
    (``("train", "lr")``) came from, defaults left out; ``notices`` are one line each. ``request`` and ``objects`` are
    what it was resolved from.
    """

    config: Config
    plugins: Mapping[str, tuple[Plugin, ...]]
    sizes: Sizes
    layout: tuple[Place, ...]
    plans: Mapping[int, Plan]
    origins: Mapping[Key, Origin]
    notices: tuple[str, ...]
    request: Request = field(default_factory=Request)
    objects: tuple[object, ...] = ()

    def one(self, kind: str) -> Plugin:
        """The plugin of a kind that takes exactly one."""
        (plugin,) = self.plugins[kind]
        return plugin

    def digest(self) -> dict[str, str]:
        """What must agree between all ranks, as a flat table of texts."""
        return digest(self)

    def to_yaml(self) -> str:
        """A configuration file that resolves to this run."""
        return to_yaml(self)

    def describe(self) -> str:
        """The run in words: plugins, topology, pipeline, notices."""
        return describe(self)

    def to_json(self) -> dict[str, Any]:
        """What :meth:`describe` says, as JSON data."""
        return to_json(self)

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        chosen = ", ".join(f"{kind}={'+'.join(each.name for each in many)}" for kind, many in self.plugins.items())
        return f"ResolvedRun({chosen}, world={self.sizes.world})"
