"""Gradients: flat buckets that hold every ``main_grad``, and the accumulator that sees each gradient arrive.

The way of a gradient through one step, from ``Trainer._accumulate`` to the collective. Indented calls are callbacks::

    optimizer.zero_grad()                                 BucketReducer.start_step: nothing has arrived
    accumulator.start_step(microbatches, grad_ready)
    executor.run(program)
      action B or I: torch.autograd.backward
        a layer that can defer its weight gradient        accumulator.submit: computed now in B, queued in I
        any other parameter (post-accumulate hook)        accumulator._move_grad: .grad is added to main_grad
        a replayed graph                                  accumulator.arrived: its kernels have added to main_grad
      action W                                            accumulator.run_deferred: computes what I has queued
        after a parameter's last arrival in the step
          optimizer.grad_ready(parameter)                 BucketReducer.arrived
            the next bucket of the chunk is complete      FlatOptimizer._send: scaled by 1 / data-parallel size
              ShardingStrategy.start_reduce(bucket)       adamw: all-reduce; zero1: reduce-scatter; asynchronous
      after the last backward of a chunk
        optimizer.start_grad_sync(chunk)                  BucketReducer.flush: sends the rest of the chunk
    optimizer.finish_grad_sync()                          BucketReducer.finish: sends all that is left, and waits;
                                                          then partial gradients are summed over tensor or tie ranks

To change how gradients are reduced, write a ``ShardingStrategy`` (``optim.sharding``); ``optimizer=adamw`` is one in 20
lines. To change when they are sent, see ``optim.reducer``.
"""

from megatron_run_engine.runtime.gradients.accumulator import GradientAccumulator
from megatron_run_engine.runtime.gradients.buckets import DEFAULT_CAPACITY, Bucket, build_buckets, main_grad

__all__ = ["DEFAULT_CAPACITY", "Bucket", "GradientAccumulator", "build_buckets", "main_grad"]
