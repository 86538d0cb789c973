"""Sends gradient buckets during the backward, in an order that is fixed in advance.

The order must not depend on when gradients arrive: ranks would then start their collectives in different orders, and
deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run_engine.optim.buckets import Bucket
    from megatron_run_engine.runtime.comm import Pending


class BucketReducer:
    """Sends each bucket once per step, by ``send``: once it and all buckets before it in its chunk are complete.

    Without ``early`` all buckets are sent at the end of the step.
    """

    def __init__(self, buckets: Sequence[Bucket], send: Callable[[Bucket], Pending], *, early: bool) -> None:
        self._buckets, self._send_bucket, self._early = buckets, send, early
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self._waiting: dict[Bucket, set[Parameter]] = {}
        self._unsent: dict[int, deque[Bucket]] = {}
        self._sent: dict[Bucket, Pending] = {}

    def start_step(self) -> None:
        """Begin a step: every bucket waits for all its parameters, and none has been sent."""
        self._waiting = {bucket: set(bucket.parameters) for bucket in self._buckets}
        self._unsent, self._sent = {}, {}
        for bucket in self._buckets:
            if bucket.chunk is not None:
                self._unsent.setdefault(bucket.chunk, deque()).append(bucket)

    def arrived(self, parameter: Parameter) -> None:
        """Note that ``parameter.main_grad`` is complete, and send the buckets that are complete now, in order."""
        bucket = self._bucket_of[parameter]
        self._waiting[bucket].discard(parameter)
        if bucket.chunk is None or not self._early:
            return  # a tied parameter: other chunks may still add to it, so finish() sends it
        unsent = self._unsent[bucket.chunk]
        while unsent and not self._waiting[unsent[0]]:
            self._send(unsent.popleft())

    def flush(self, chunk: int) -> None:
        """Send the remaining buckets of ``chunk``, whose last backward is done."""
        unsent = self._unsent.get(chunk)
        while self._early and unsent:
            self._send(unsent.popleft())

    def finish(self) -> None:
        """Send all remaining buckets, the tied ones among them, and wait for every bucket."""
        for bucket in self._buckets:
            if bucket not in self._sent:
                self._send(bucket)
        for pending in self._sent.values():
            pending.wait()

    def _send(self, bucket: Bucket) -> None:
        self._sent[bucket] = self._send_bucket(bucket)
