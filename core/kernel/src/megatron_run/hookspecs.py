"""Every hook of megatron-run, on one screen.

A plugin is a module. It says what it is (`megatron_run_plugin_info`) and, for its kind, makes one object
(`megatron_run_create_<kind>`). A hook is a factory called at start-up, in every rank and perhaps before, while the run
is planned; the object's methods, whose contract is in `megatron_run.contracts`, are what the training loop calls. An
implementation may leave out arguments it does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from typing import TypeAlias

    from pydantic import BaseModel

    from megatron_run.contracts import (
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

    #: `megatron_run_engine.BuildContext`. What it hands down needs torch, so the kernel does not import it.
    BuildContext: TypeAlias = Any

hookspec = pluggy.HookspecMarker("megatron_run")
hookimpl = pluggy.HookimplMarker("megatron_run")


@hookspec(firstresult=True)
def megatron_run_plugin_info() -> PluginInfo:  # type: ignore[empty-body]
    """Say kind, name, options, and what the plugin provides, requires and suggests."""


@hookspec(firstresult=True)
def megatron_run_create_scaler(context: BuildContext, options: BaseModel) -> Scaler:  # type: ignore[empty-body]
    """Make the object that holds the loss scale."""


@hookspec(firstresult=True)
def megatron_run_create_optimizer(context: BuildContext, options: BaseModel) -> Optimizer:  # type: ignore[empty-body]
    """Make the object that reduces gradients and updates parameters."""


@hookspec(firstresult=True)
def megatron_run_create_schedule(options: BaseModel) -> Schedule:  # type: ignore[empty-body]
    """Make the schedule: pure data, so it is given no context and can be planned on any laptop."""


@hookspec(firstresult=True)
def megatron_run_create_parallel_layer(  # type: ignore[empty-body]
    context: BuildContext, options: BaseModel, base: ParallelLayers | None
) -> ParallelLayers:
    """Make the factory of layers. One that asks for ``base`` gets the factory below it; one that does not is lowest."""


@hookspec(firstresult=True)
def megatron_run_create_graph_capture(context: BuildContext, options: BaseModel) -> GraphCapture:  # type: ignore[empty-body]
    """Make the object that captures and replays segments of layers."""


@hookspec(firstresult=True)
def megatron_run_create_model(context: BuildContext, options: BaseModel) -> Model:  # type: ignore[empty-body]
    """Make the description of the network, which builds its chunks from parallel layers."""


@hookspec(firstresult=True)
def megatron_run_create_data(options: BaseModel) -> DataSource:  # type: ignore[empty-body]
    """Make the source of samples; cheap: files are read when a split is asked for."""


@hookspec(firstresult=True)
def megatron_run_create_observer(options: BaseModel) -> Observer:  # type: ignore[empty-body]
    """Make an object that watches the run and never changes it."""


@hookspec(firstresult=True)
def megatron_run_create_format() -> Format:  # type: ignore[empty-body]
    """Make what reads and writes models of another program; it serves one conversion, and so has no options."""
