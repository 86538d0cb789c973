"""The resolved run: everything that is decided before a process group exists, and the digest that ranks compare."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from megatron_run import __version__
from megatron_run.config.origin import KIND_SECTIONS, dotted
from megatron_run.config.request import Request
from megatron_run.config.values import leaves
from megatron_run.config.yaml import yaml_text
from megatron_run.contracts.plugin import SEPARATORS
from megatron_run.planning.choosing import dumped
from megatron_run.registry.discover import KERNEL, source_digest

if TYPE_CHECKING:
    from megatron_run.config.origin import Key, Origin
    from megatron_run.contracts import BuildContext, DataSource, GraphCapture, Model, Optimizer, Scaler
    from megatron_run.contracts.schedule import Place
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
    def spares(self) -> int:
        """The ranks that are there, and of which ``run.elastic`` takes none."""
        there = self.request.there or self.request.nproc
        return 0 if there is None else max(0, there - self.sizes.world)

    @property
    def unloaded(self) -> tuple[Plugin, ...]:
        """The plugins that could not be loaded without the engine; empty for a run that can be trained."""
        return tuple(plugin for stack in self.plugins.values() for plugin in stack if not plugin.loaded)

    def one(self, kind: str) -> Plugin:
        """The plugin of a kind that takes exactly one."""
        (plugin,) = self.plugins[kind]
        return plugin

    def make_data(self) -> DataSource:
        """A new data source. This and the methods below raise :class:`PluginError` as :meth:`Plugin.create` does."""
        made: DataSource = self.one("data").create()
        return made

    def make_model(self, context: BuildContext) -> Model:
        """A new model of a rank, with the options of its ``context``."""
        made: Model = self.one("model").with_options(context.model).create(context=context)
        return made

    def make_optimizer(self, context: BuildContext) -> Optimizer:
        """A new optimizer of a rank."""
        made: Optimizer = self.one("optimizer").create(context=context)
        return made

    def make_scaler(self, context: BuildContext) -> Scaler:
        """A new scaler."""
        made: Scaler = self.one("scaler").create(context=context)
        return made

    def make_graph_capture(self, context: BuildContext) -> GraphCapture:
        """A new graph capture."""
        made: GraphCapture = self.one("graph-capture").create(context=context)
        return made

    def __repr__(self) -> str:
        chosen = ", ".join(f"{kind}={'+'.join(each.name for each in stack)}" for kind, stack in self.plugins.items())
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


#: Keys that may differ between ranks.
_LOCAL = {("run", "folder"), ("run", "device"), ("run", "threads")}


def comparison_table(run: ResolvedRun) -> dict[str, str]:
    """Names, versions, code, options, configuration and action lists of ``run``; equal on every rank."""
    table = {KERNEL: __version__}
    for package in ("megatron_run", "megatron_run_engine"):  # a rank that trains has imported both
        if package in sys.modules:
            table[f"{package} code"] = source_digest(sys.modules[package])
    for kind, plugins in run.plugins.items():
        for plugin in plugins:
            table.update(_plugin_rows(f"{kind}={plugin.name}" if kind in SEPARATORS else kind, plugin))
        table[kind] = "+".join(plugin.name for plugin in plugins)
    config = run.config.model_dump(mode="json", exclude=set(KIND_SECTIONS))
    table.update({dotted(key): json.dumps(value) for key, value in leaves(config) if key not in _LOCAL})
    table["layout"] = " ".join(f"{place.stage}.{place.chunk}:{list(place.layers)}" for place in run.layout)
    for microbatches, plan in sorted(run.plans.items()):
        table[f"actions of {microbatches} microbatches"] = _actions_digest(plan)
    return table


def _plugin_rows(name: str, plugin: Plugin) -> dict[str, str]:
    options = {f"{name} option {'.'.join(key)}": json.dumps(value) for key, value in leaves(dumped(plugin))}
    return {f"{name} version": f"{plugin.distribution} {plugin.version}", f"{name} code": plugin.digest, **options}


def _actions_digest(plan: Plan) -> str:
    text = "\n".join(" ".join(map(str, actions)) for actions in plan.lists)
    return sha256(text.encode()).hexdigest()
