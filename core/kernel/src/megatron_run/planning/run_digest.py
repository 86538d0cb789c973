"""All that ranks must have resolved to the same values, as a flat table whose differences can be listed."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from typing import TYPE_CHECKING

from megatron_run import __version__
from megatron_run.config.merge import SEPARATORS
from megatron_run.config.origin import KIND_SECTIONS, dotted
from megatron_run.planning.options import dumped
from megatron_run.planning.run import leaves
from megatron_run.registry.discover import KERNEL
from megatron_run.registry.source_digest import source_digest

if TYPE_CHECKING:
    from megatron_run.pipeline.plan import Plan
    from megatron_run.planning.run import ResolvedRun
    from megatron_run.registry.loaded_plugin import Plugin

#: Keys that may differ between ranks.
_LOCAL = {("run", "folder"), ("run", "device"), ("run", "threads")}


def digest(run: ResolvedRun) -> dict[str, str]:
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
    options = {f"{name} option {key}": json.dumps(value) for key, value in dumped(plugin).items()}
    return {f"{name} version": f"{plugin.distribution} {plugin.version}", f"{name} code": plugin.digest, **options}


def _actions_digest(plan: Plan) -> str:
    text = "\n".join(" ".join(map(str, actions)) for actions in plan.lists)
    return sha256(text.encode()).hexdigest()
