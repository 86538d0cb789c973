"""The distributed optimizer, ZeRO-1 (Rajbhandari et al. 2020): optimizer state is sharded over the data-parallel ranks.

Gradients are reduce-scattered, each rank updates its shard of every bucket in fp32, and the updated parameters are
gathered. With data-parallel size d, a rank's master weights and moments are 1/d of ``adamw``'s; the update and the
communicated volume are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megatron_run.contracts import PluginInfo
from megatron_run.contracts.meaning import NOT_LEARNED
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.optim import FlatOptimizer, Sharded, UpdateOptions, check_update

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_run.contracts import Optimizer
    from megatron_run.contracts.schema import Config
    from megatron_run_engine.runtime import BuildContext


class Zero1Options(UpdateOptions):
    """Options of optimizer ``zero1``: those of ``adamw``, and when parameters are gathered."""

    overlap_param_gather: Annotated[bool, NOT_LEARNED] = Field(
        True,
        description="gather parameters while the next forward runs, which waits for each bucket that it reads",
    )


def check_config(config: Config, options: Zero1Options) -> Iterator[str]:
    """The notices of the update rule, and one if no two ranks hold the same parameters."""
    yield from check_update(config, options)
    if config.parallel.data == config.parallel.context == 1:
        yield "optimizer=zero1 shards nothing over one data-parallel rank: each rank holds as much as with adamw"


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("optimizer", "zero1", options=Zero1Options, check_config=check_config)


@hookimpl
def megatron_run_create_optimizer(context: BuildContext, options: Zero1Options) -> Optimizer:
    """Make the optimizer."""
    return FlatOptimizer(context, options, Sharded, overlap_param_gather=options.overlap_param_gather)
