"""AdamW, or any other rule, with replicated data parallelism whose all-reduce sends half the bytes: in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_run.contracts import Optimizer, PluginInfo
from megatron_run.hookspecs import hookimpl
from megatron_run_engine.optim import Bucket, FlatOptimizer, ShardingStrategy, UpdateOptions, check_update
from megatron_run_engine.runtime import BuildContext, ParallelGroup, Pending


class HalfTheBytes(ShardingStrategy):
    def __init__(self, peers: ParallelGroup) -> None:
        self._peers = peers

    def updated(self, bucket: Bucket) -> range:
        return range(len(bucket.grad))

    def start_reduce(self, bucket: Bucket) -> Pending:
        if self._peers.size > 1:
            bucket.grad.copy_(self._peers.sum_(bucket.grad.to(torch.bfloat16)))
        return Pending(bucket.grad)

    def start_gather(self, values: Tensor, bucket: Bucket) -> Pending:
        return Pending(values)


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    return PluginInfo("optimizer", "half-the-bytes", options=UpdateOptions, check_config=check_update)


@hookimpl
def megatron_run_create_optimizer(context: BuildContext, options: UpdateOptions) -> Optimizer:
    return FlatOptimizer(context, options, HalfTheBytes)
