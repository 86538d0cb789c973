"""The common part of data-parallel optimizers: an update rule on flat buffers, divided over ranks.

``FlatOptimizer`` implements the whole contract except one question: how data-parallel ranks divide a buffer. A
``ShardingStrategy`` answers it. ``optimizer=adamw`` and ``optimizer=zero1`` are one each.

Imports: contracts, errors, runtime.
"""

from megatron_run_engine.optim.flat import FlatOptimizer
from megatron_run_engine.optim.ranges import FlatBox, ParamRange, PartBox, boxes, param_range, param_ranges, part_boxes
from megatron_run_engine.optim.sharding import ShardingStrategy
from megatron_run_engine.optim.update_rules import UpdateOptions, check_update

__all__ = [
    "FlatBox",
    "FlatOptimizer",
    "ParamRange",
    "PartBox",
    "ShardingStrategy",
    "UpdateOptions",
    "boxes",
    "check_update",
    "param_range",
    "param_ranges",
    "part_boxes",
]
