"""Gradients belong to the kernel: flat buckets that hold every ``main_grad``, and the ledger of what arrives."""

from megatron_run_engine.runtime.gradients.accumulator import GradientAccumulator
from megatron_run_engine.runtime.gradients.buckets import DEFAULT_CAPACITY, Bucket, build_buckets, main_grad

__all__ = ["DEFAULT_CAPACITY", "Bucket", "GradientAccumulator", "build_buckets", "main_grad"]
