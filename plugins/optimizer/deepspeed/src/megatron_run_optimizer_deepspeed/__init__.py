"""Optimizer ``deepspeed``: DeepSpeed's ZeRO stages 1 and 2 behind our contract, without DeepSpeed's engine.

DeepSpeed's own code splits optimizer state and the update over the data-parallel ranks. It is imported when a run
starts, never before.

Reading order: ``rule`` (options, and the rule that they choose), ``library`` (finding DeepSpeed), ``partitions`` (the
values that a rank updates, and their boxes), ``zero`` (the used part of DeepSpeed), ``optimizer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_run.config.values import flat
from megatron_run.contracts import Optimizer, PluginInfo
from megatron_run.errors import InputError
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.optim import check_update
from megatron_run_optimizer_deepspeed.library import find_deepspeed
from megatron_run_optimizer_deepspeed.optimizer import DeepSpeedZero
from megatron_run_optimizer_deepspeed.rule import Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_run.contracts.schema import Config
    from megatron_run_engine.runtime import BuildContext


def check_config(config: Config, options: Options) -> Iterator[str]:
    """Notices about stages that shard nothing. Raises :class:`InputError` for expert parallelism and router biases."""
    if config.parallel.expert > 1:
        raise InputError(
            f"optimizer=deepspeed reduces every gradient over all data-parallel ranks, and parallel.expert="
            f"{config.parallel.expert} shares experts among some",
            fix="set parallel.expert=1, or choose --plugin optimizer=zero1 or adamw",
        )
    if flat(config.model.options).get("experts.router.bias_rate"):
        raise InputError(
            "optimizer=deepspeed keeps master weights of all parameters, and model.experts.router.bias_rate moves "
            "biases of routers without it: its next update would undo that",
            fix="choose --plugin optimizer=zero1 or adamw, or balance by model.experts.aux_loss_coeff",
        )
    yield from check_update(config, options.update)
    if config.parallel.data == config.parallel.context == 1:
        yield f"optimizer=deepspeed: with one data-parallel rank stage {options.stage} shards nothing"
    elif options.stage == 2:
        yield "optimizer=deepspeed: stage 2 saves no memory over stage 1 here, since main_grad stays whole"


def check_device(device: str, _: Options) -> None:
    """Raise :class:`megatron_run.errors.PluginError` unless DeepSpeed can be imported for ``device``."""
    find_deepspeed(torch.device(device))


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Describe the plugin."""
    return PluginInfo("optimizer", "deepspeed", options=Options, check_config=check_config, check_device=check_device)


@hookimpl
def megatron_run_create_optimizer(context: BuildContext, options: Options) -> Optimizer:
    """Make the optimizer."""
    return DeepSpeedZero(context, options)
