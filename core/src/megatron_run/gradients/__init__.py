"""Gradients belong to the kernel: flat buckets that hold every ``main_grad``, and the ledger of what arrives."""

from megatron_run.gradients.buckets import DEFAULT_CAPACITY, Bucket, build_buckets, main_grad
from megatron_run.gradients.ledger import Gradients

__all__ = ["DEFAULT_CAPACITY", "Bucket", "Gradients", "build_buckets", "main_grad"]
