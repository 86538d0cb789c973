"""Gradients of one rank: their accumulator, and the way of a gradient from a layer to its reduction.

The callbacks of one step, from the backward to the reduction. ``optimizer`` is a ``FlatOptimizer`` (``optim/flat.py``),
``gradients`` a :class:`GradientAccumulator`::

    Trainer._accumulate
      optimizer.zero_grad()                            clears the buckets
      gradients.start_step(M, optimizer.grad_ready)    M microbatches; what to call at last arrivals
      StepRunner.run -> Executor.run(program, StepInputs(..., start_grad_sync=optimizer.start_grad_sync))
        action B or I: torch.autograd.backward
          layer with a split backward                  gradients.submit(parameters, compute)
            B: now; I: kept for W                        compute() adds to main_grad
          any other parameter                          hook: adds .grad to main_grad
          replayed graph of a segment                  gradients.arrived(parameters)
        action W                                       gradients.run_deferred: what I has kept
        any of these, at the last arrival of a step    optimizer.grad_ready(parameter)
          bucket complete, and the next of its chunk     BucketReducer.arrived
            FlatOptimizer._send: times grad_scale          ShardingStrategy.start_reduce(bucket)
              the strategy of bucket.replicas                ParallelGroup.start_sum or start_sum_shares
        after a chunk's last backward                  optimizer.start_grad_sync(chunk)
          the chunk's remaining buckets                  BucketReducer.flush -> _send, as above
      optimizer.finish_grad_sync()
        tied buckets; waits for every collective         BucketReducer.finish -> _send, as above
        partial gradients are summed over their axis     groups.sum_
        where it updates: to the type of the masters     Place.take: take_gradients
    Trainer._update                                    unscale_, clip_, step, start_param_sync

An optimizer that lends memory (``optim/lending.py``) is told before each addition, by ``before_adding``:
``LentGradients.begin`` gives the segment's gradients memory and reduces those of the segment before, whose shares
``LentShard.add_reduced`` adds up. What is left goes with ``start_grad_sync`` and ``finish_grad_sync``.

A replay of the whole step (``training/step_runner.py``) runs no action: all backwards end first, then it calls
``gradients.arrived`` once and ``start_grad_sync`` for each chunk, so that no reduction overlaps with a backward. An
optimizer that is no ``FlatOptimizer`` answers the same three calls as it likes: that of ``plugins/optimizer/deepspeed``
has no reducer, ignores ``grad_ready`` and ``start_grad_sync``, and reduces everything in ``finish_grad_sync``.

To change *what* is sent, write a :class:`~megatron_run_engine.optim.ShardingStrategy` in an optimizer plugin, as
``builtin/optimizer/adamw.py`` and ``tests/examples/plugins/optimizer.py`` do in 50 lines; its collectives are methods
of ``runtime/comm/parallel_group.py``. *When* it is sent, see ``optim/reducer.py``; *which* gradients are reduced
together, see ``optim/buckets.py`` (a small model has several with ``--set optimizer.bucket_size=20000``); *how* a
gradient arrives and which arrival is the last, see ``accumulator.py``.

The accumulator learns in the first step how often a parameter's gradient arrives per microbatch. In that step no
arrival is known to be the last, so ``start_grad_sync`` and ``finish_grad_sync`` send everything.
"""

from megatron_run_engine.runtime.gradients.accumulator import (
    GradientAccumulator,
    give_main_grad,
    has_main_grad,
    main_grad,
    own_main_grad,
    take_main_grad,
)

__all__ = ["GradientAccumulator", "give_main_grad", "has_main_grad", "main_grad", "own_main_grad", "take_main_grad"]
