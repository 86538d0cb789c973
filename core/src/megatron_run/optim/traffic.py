"""Gradients leave in one sequence that is fixed in advance, bucket by bucket, while the backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.comm import Pending
    from megatron_run.gradients import Bucket


class GradientTraffic:
    """Sends each bucket once a step with ``send``: only complete ones, and only at the head of their chunk's sequence.

    With ``early`` false everything leaves at the end of the step.
    """

    def __init__(self, buckets: Sequence[Bucket], send: Callable[[Bucket], Pending], *, early: bool) -> None:
        self._buckets, self._start, self._early = buckets, send, early
        self._bucket_of = {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self._waiting: dict[Bucket, set[Parameter]] = {}
        self._sent: dict[Bucket, Pending] = {}

    @property
    def sent(self) -> list[Bucket]:
        """The buckets that have left in this step, in order."""
        return list(self._sent)

    def start_step(self) -> None:
        """Nothing has arrived and nothing is sent."""
        self._waiting = {bucket: set(bucket.parameters) for bucket in self._buckets}
        self._sent = {}

    def arrived(self, parameter: Parameter) -> None:
        """The last gradient of the step is in ``parameter.main_grad``: send what is complete, in order."""
        bucket = self._bucket_of[parameter]
        self._waiting[bucket].discard(parameter)
        if bucket.chunk is None or not self._early:
            return  # tied: other chunks may still add to it
        for head in self._sequence(bucket.chunk):
            if self._waiting[head]:
                return
            self._send(head)

    def flush(self, chunk: int) -> None:
        """Send what is left of ``chunk``."""
        if self._early:
            for bucket in self._sequence(chunk):
                self._send(bucket)

    def finish(self) -> None:
        """Send everything that is left, tied buckets too, and wait for it."""
        for bucket in self._buckets:
            self._send(bucket)
        for pending in self._sent.values():
            pending.wait()

    def _sequence(self, chunk: int) -> list[Bucket]:
        return [bucket for bucket in self._buckets if bucket.chunk == chunk]

    def _send(self, bucket: Bucket) -> None:
        if bucket not in self._sent:
            self._sent[bucket] = self._start(bucket)
