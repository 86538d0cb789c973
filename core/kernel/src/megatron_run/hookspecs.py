"""Every hook of megatron-run, on one screen.

A plugin is a module. It describes itself (`megatron_run_plugin_info`) and creates one object of its kind
(`megatron_run_create_<kind>`). Hooks are factories: they are called at start-up, on every rank, and perhaps earlier,
while the run is planned. The training loop calls the methods of the created object, whose contract is in
`megatron_run.contracts`. An implementation may omit arguments that it does not need.

A module with commands has one hook, `megatron_run_commands`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    from pydantic import BaseModel

    from megatron_run.contracts import (
        BuildContext,
        DataSource,
        Format,
        GraphCapture,
        Model,
        Observer,
        Optimizer,
        ParallelLayers,
        PluginInfo,
        Scaler,
        Schedule,
    )

    #: `click.Command`. The kernel needs no click.
    Command: TypeAlias = Any

hookspec = pluggy.HookspecMarker("megatron_run")
hookimpl = pluggy.HookimplMarker("megatron_run")


@hookspec(firstresult=True)
def megatron_run_plugin_info() -> PluginInfo:  # type: ignore[empty-body]
    """Describe the plugin: kind, name, options, and what it provides, requires and suggests."""


@hookspec(firstresult=True)
def megatron_run_create_scaler(context: BuildContext, options: BaseModel) -> Scaler:  # type: ignore[empty-body]
    """Create the object that holds the loss scale."""


@hookspec(firstresult=True)
def megatron_run_create_optimizer(context: BuildContext, options: BaseModel) -> Optimizer:  # type: ignore[empty-body]
    """Create the object that reduces gradients and updates parameters."""


@hookspec(firstresult=True)
def megatron_run_create_schedule(options: BaseModel) -> Schedule:  # type: ignore[empty-body]
    """Create the schedule: pure data, so it receives no context and can be planned on any machine."""


@hookspec(firstresult=True)
def megatron_run_create_parallel_layer(  # type: ignore[empty-body]
    context: BuildContext, options: BaseModel, base: ParallelLayers | None
) -> ParallelLayers:
    """Create the factory of layers. With an argument ``base`` it gets the factory below; without, it is the lowest."""


@hookspec(firstresult=True)
def megatron_run_create_graph_capture(context: BuildContext, options: BaseModel) -> GraphCapture:  # type: ignore[empty-body]
    """Create the object that captures and replays segments of layers."""


@hookspec(firstresult=True)
def megatron_run_create_model(context: BuildContext, options: BaseModel) -> Model:  # type: ignore[empty-body]
    """Create the description of the network, which builds its chunks from parallel layers."""


@hookspec(firstresult=True)
def megatron_run_create_data(options: BaseModel) -> DataSource:  # type: ignore[empty-body]
    """Create the source of samples. It must be cheap: files are read when a split is opened."""


@hookspec(firstresult=True)
def megatron_run_create_observer(options: BaseModel) -> Observer:  # type: ignore[empty-body]
    """Create an object that sees the events of the run and never changes it."""


@hookspec(firstresult=True)
def megatron_run_create_format() -> Format:  # type: ignore[empty-body]
    """Create the reader and writer of another program's models. It serves one conversion and has no options."""


@hookspec(firstresult=True)
def megatron_run_commands() -> Mapping[str, Command]:  # type: ignore[empty-body]
    """Make commands of `megatron-run` by the names of their entry points, as `{"data.cache": cache}`.

    A command is a `click.Command`; a group of commands is one too. The module is imported when somebody types one of
    its commands or asks which there are, so it must be light: what a command needs is imported in its body.
    """
