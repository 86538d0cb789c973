"""Gradients of one rank: the buckets that hold every ``main_grad``, their accumulator and their reducer.

The callbacks of one step, from the backward to the reduction::

    Trainer._accumulate
      optimizer.zero_grad()                            clears the buckets
      gradients.start_step(M, optimizer.grad_ready)    M microbatches; what to call at last arrivals
      executor.run(program, StepInputs(..., start_grad_sync=optimizer.start_grad_sync))
        action B or I: torch.autograd.backward
          layer with a split backward                  gradients.submit(parameters, compute)
            B: now; I: kept for W                        compute() adds to main_grad
          any other parameter                          hook: adds .grad to main_grad
          replayed graph                               gradients.arrived(parameters)
        action W                                       gradients.run_deferred: what I has kept
        any of these, at the last arrival of a step    optimizer.grad_ready(parameter)
          bucket complete, and the next of its chunk     BucketReducer.arrived
            collective overlaps with the backward          ShardingStrategy.start_reduce(bucket)
        after a chunk's last backward                  optimizer.start_grad_sync(chunk)
          the chunk's remaining buckets                  BucketReducer.flush
      optimizer.finish_grad_sync()
        tied buckets; waits for every collective         BucketReducer.finish
        partial gradients are summed over their axis     groups.sum_
    Trainer._update                                    unscale_, clip_, step, start_param_sync

To change *what* is sent, write a :class:`~megatron_run_engine.optim.ShardingStrategy` in an optimizer plugin, as
``builtin/optimizer/adamw.py`` and ``tests/examples/plugins/optimizer.py`` do in 50 lines; *when* it is sent, see
``reducer.py``; *which* gradients are reduced together, see ``buckets.py``; *how* a gradient arrives and
which arrival is the last, see ``accumulator.py``.

The accumulator learns in the first step how often a parameter's gradient arrives per microbatch. In that step no
arrival is known to be the last, so ``start_grad_sync`` and ``finish_grad_sync`` send everything.
"""

from megatron_run_engine.runtime.gradients.accumulator import GradientAccumulator
from megatron_run_engine.runtime.gradients.buckets import (
    DEFAULT_CAPACITY,
    Bucket,
    build_buckets,
    has_main_grad,
    main_grad,
    own_main_grad,
)
from megatron_run_engine.runtime.gradients.reducer import BucketReducer

__all__ = [
    "DEFAULT_CAPACITY",
    "Bucket",
    "BucketReducer",
    "GradientAccumulator",
    "build_buckets",
    "has_main_grad",
    "main_grad",
    "own_main_grad",
]
