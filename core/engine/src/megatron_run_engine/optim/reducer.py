"""Starts the reduction of gradients bucket by bucket, in a fixed order, while the backward is still running.

The order is fixed because collectives pair up by order: ranks that complete buckets in different orders would otherwise
reduce one bucket with another. ``runtime.gradients`` draws who calls this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run_engine.runtime.comm import Pending
    from megatron_run_engine.runtime.gradients import Bucket


class BucketReducer:
    """Sends each bucket once per step with ``send``: when it is complete, and all before it in its chunk are sent.

    With ``early`` false all buckets are sent at the end of the step.
    """

    def __init__(self, buckets: Sequence[Bucket], send: Callable[[Bucket], Pending], *, early: bool) -> None:
        self._buckets, self._start, self._early = buckets, send, early
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self._waiting: dict[Bucket, set[Parameter]] = {}
        self._unsent: dict[int, deque[Bucket]] = {}
        self._sent: dict[Bucket, Pending] = {}

    def start_step(self) -> None:
        """Begin a step: no gradient has arrived and no bucket is sent."""
        self._waiting = {bucket: set(bucket.parameters) for bucket in self._buckets}
        self._unsent, self._sent = {}, {}
        for bucket in self._buckets:
            if bucket.chunk is not None:
                self._unsent.setdefault(bucket.chunk, deque()).append(bucket)

    def arrived(self, parameter: Parameter) -> None:
        """Note that ``parameter.main_grad`` is final in this step, and send the buckets that are complete, in order."""
        bucket = self._bucket_of[parameter]
        self._waiting[bucket].discard(parameter)
        if bucket.chunk is None or not self._early:
            return  # a tied parameter: other chunks may still add to it
        unsent = self._unsent[bucket.chunk]
        while unsent and not self._waiting[unsent[0]]:
            self._send(unsent.popleft())

    def flush(self, chunk: int) -> None:
        """Send the remaining buckets of ``chunk``."""
        unsent = self._unsent.get(chunk)
        while self._early and unsent:
            self._send(unsent.popleft())

    def finish(self) -> None:
        """Send all remaining buckets, tied ones too, and wait for every reduction."""
        for bucket in self._buckets:
            if bucket not in self._sent:
                self._send(bucket)
        for pending in self._sent.values():
            pending.wait()

    def _send(self, bucket: Bucket) -> None:
        self._sent[bucket] = self._start(bucket)
