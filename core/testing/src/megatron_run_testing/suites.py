"""The conformance suite of each kind, applied to a plugin: a table with one line per kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megatron_run.registry.discover import Entry
from megatron_run.registry.loaded_plugin import Plugin
from megatron_run_testing.check import Check


def _scaler(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.scaler import scaler_checks

    return scaler_checks(lambda context: plugin.create(context=context))


def _optimizer(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.optimizer import PluginOptimizer, optimizer_checks

    return optimizer_checks(PluginOptimizer(*_sendable(plugin)), ranks=(1, 2, 4))


def _graph_capture(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run.errors import PluginError
    from megatron_run_testing.graph_capture import graph_capture_checks

    def why_not() -> str:
        """Why the plugin refuses the CPU, on which it is checked; an exception of another type is a failure."""
        try:
            if plugin.info.check_device is not None:
                plugin.info.check_device("cpu", plugin.options)
        except PluginError as refusal:
            return refusal.what
        return ""

    return graph_capture_checks(lambda context: plugin.create(context=context), why_not)


def _schedule(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.schedule import schedule_checks

    return schedule_checks(plugin.create())


def _parallel_layer(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.parallel_layer import PluginLayers, parallel_layer_checks

    return parallel_layer_checks(
        PluginLayers(*_sendable(plugin)),
        ranks=(1, 2, 4) if "parallel.tensor" in plugin.provides else (1,),
        sequence="parallel.sequence" in plugin.provides,
    )


def _model(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.model import model_checks

    assert plugin.options is not None  # a model has at least num_layers and vocab_size
    return model_checks(lambda context, options: plugin.with_options(options).create(context=context), plugin.options)


def _data(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.data import data_checks

    return data_checks(plugin.create())


def _observer(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.observer import observer_checks

    return observer_checks(plugin.create)


def _format(plugin: Plugin) -> tuple[Check, ...]:
    from megatron_run_testing.format import format_checks

    return format_checks(plugin.create(), plugin.info.provides)


#: Kind -> a function from a plugin, with its options set, to its checks. It imports the suite when it is called.
SUITES: Mapping[str, Callable[[Plugin], tuple[Check, ...]]] = MappingProxyType(
    {
        "scaler": _scaler,
        "optimizer": _optimizer,
        "schedule": _schedule,
        "parallel-layer": _parallel_layer,
        "graph-capture": _graph_capture,
        "model": _model,
        "data": _data,
        "observer": _observer,
        "format": _format,
    }
)


def _sendable(plugin: Plugin) -> tuple[Entry, Mapping[str, Any]]:
    """The entry and options from which another process creates the same plugin."""
    assert plugin.entry is not None  # a checked plugin is installed, or is a file
    return plugin.entry, {} if plugin.options is None else plugin.options.model_dump()


def checks_for(plugin: Plugin) -> tuple[Check, ...]:
    """The checks of the plugin's kind."""
    return SUITES[plugin.kind](plugin)
