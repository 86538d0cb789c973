"""ZeRO-3 by segments (Rajbhandari et al. 2020): parameters, gradients and state are sharded over data-parallel ranks.

The parameters of a segment of a layer are gathered before its forward and again before its backward, those of the next
one beside its work; its gradients are reduce-scattered when its backward has ended. With data-parallel size d, a rank
keeps 1/d of ``adamw``'s bytes, and two segments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from megatron_run.contracts import PluginInfo
from megatron_run.contracts.meaning import NOT_LEARNED
from megatron_run.errors import InputError
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.optim import LendingOptimizer, Sharded, UpdateOptions, check_update

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from megatron_run.contracts import Optimizer
    from megatron_run.contracts.schema import Config
    from megatron_run_engine.runtime import BuildContext


class Zero3Options(UpdateOptions):
    """Options of optimizer ``zero3``: those of ``adamw``, and what is whole for how long."""

    segments_held: Annotated[int, NOT_LEARNED] = Field(
        2,
        ge=0,
        description="segments whose parameters are whole at a time: the one that runs and those gathered ahead; "
        "0: all, from their first use in a step to the update",
    )
    reduce: Literal["microbatch", "step"] = Field(
        "microbatch",
        description="how often gradients are reduced; step: they stay whole until then, and are rounded as with zero1",
    )
    whole_below: Annotated[int, NOT_LEARNED] = Field(
        2**16, ge=0, description="parameters of fewer values stay whole on every rank"
    )


def check_config(config: Config, options: Zero3Options) -> Iterator[str]:
    """The notices of the update rule, and one where nothing is sharded, or parameters travel often.

    Raises :class:`InputError` with captured graphs, which need parameters that stay where they are.
    """
    yield from check_update(config, options)
    parallel, train = config.parallel, config.train
    if parallel.data == parallel.context == 1:
        yield "optimizer=zero3 shards nothing over one data-parallel rank: each rank holds as much as with adamw"
        return
    if config.graph_capture.use != "none":
        raise InputError(
            f"optimizer=zero3 with graph-capture={config.graph_capture.use}",
            why="graphs rely on parameters that stay where they are, and zero3 gives their memory away",
            fix="choose --plugin graph-capture=none, or --plugin optimizer=zero1",
        )
    if "te" in config.parallel_layer.use and _writes_gradients(config.parallel_layer.options.get("te", {})):
        raise InputError(
            "optimizer=zero3 with parallel-layer=te",
            why="the library adds to gradients by itself, before they have memory",
            fix="set parallel-layer.fuse_weight_gradients=false, or choose --plugin optimizer=zero1",
        )
    microbatches = train.global_batch_size // (train.micro_batch_size * (parallel.data or 1))
    if parallel.pipeline > 1 and microbatches > 1 and options.segments_held:
        yield (
            f"optimizer=zero3 gathers the parameters of a stage twice in each of {microbatches} microbatches; "
            "optimizer.segments_held=0 gathers them once a step, and holds the whole stage"
        )


def _writes_gradients(options: Mapping[str, object]) -> bool:
    return bool(options.get("fuse_weight_gradients", True))


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("optimizer", "zero3", options=Zero3Options, check_config=check_config)


@hookimpl
def megatron_run_create_optimizer(context: BuildContext, options: Zero3Options) -> Optimizer:
    """Make the optimizer."""
    return LendingOptimizer(
        context, options, Sharded, held=options.segments_held, whole_below=options.whole_below, reduce=options.reduce
    )
