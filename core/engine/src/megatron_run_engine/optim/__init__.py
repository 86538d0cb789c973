"""The common part of data-parallel optimizers: an update rule on flat buffers, and how ranks divide the work.

``FlatOptimizer`` implements the whole contract except how data-parallel ranks divide a buffer, which a
``ShardingStrategy`` decides: ``optimizer=adamw`` replicates the update, ``optimizer=zero1`` shards it. The picture of a
step's callbacks is in :mod:`megatron_run_engine.runtime.gradients`.

Reading order: ``flat`` (the contract), ``buckets`` (which gradients are reduced together), ``reducer`` (when a bucket
is sent), ``sharding`` (which values lie where, and what a rank updates), ``gradients`` (their norm, and what they are
multiplied by), ``stretches`` (what a rule takes for parameters), ``update``, ``update_rules`` (the arithmetic, and the
state in checkpoints), ``rule_memory`` (what else a rule keeps from step to step) and ``one_pass`` (AdamW as one
kernel), ``place`` and ``host_place`` (an update on the device, or on the host), ``lending`` and ``loans`` (what is
whole only where a segment needs it).

Imports: contracts, errors, nn, registry, runtime.
"""

from megatron_run_engine.optim.buckets import Bucket, build_buckets
from megatron_run_engine.optim.flat import FlatOptimizer
from megatron_run_engine.optim.gradients import sum_of_squares
from megatron_run_engine.optim.lending import LendingOptimizer
from megatron_run_engine.optim.sharding import (
    FlatBox,
    ParamRange,
    PartBox,
    Replicated,
    Sharded,
    ShardingStrategy,
    boxes,
    param_range,
    param_ranges,
    part_boxes,
)
from megatron_run_engine.optim.update_rules import Decay, Multiplier, UpdateOptions, check_update, find_rule

__all__ = [
    "Bucket",
    "Decay",
    "FlatBox",
    "FlatOptimizer",
    "LendingOptimizer",
    "Multiplier",
    "ParamRange",
    "PartBox",
    "Replicated",
    "Sharded",
    "ShardingStrategy",
    "UpdateOptions",
    "boxes",
    "build_buckets",
    "check_update",
    "find_rule",
    "param_range",
    "param_ranges",
    "part_boxes",
    "sum_of_squares",
]
