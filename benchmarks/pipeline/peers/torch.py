"""A step of the same chunks by ``torch.distributed.pipelining``.

Its zero-bubble schedules are given the kernel's split backward through ``dw_builder``, the interface that it has for
this: left to itself it would walk the autograd graph to find the weight gradients, which takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_run.contracts import Microbatch

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

    from benchmarks.pipeline.model import Stage
    from megatron_run_engine.nn import DecoderChunk
    from megatron_run_engine.runtime.gradients import GradientAccumulator

#: Schedules of one stage object a rank; the others take a list.
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
SPLITTING = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")


class Piece(nn.Module):
    """A chunk as a module from tensor to tensor: tokens [b, s] or x [s, b, h] -> x [s, b, h] or logits [s, b, v]."""

    def __init__(self, chunk: DecoderChunk) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, x: Tensor) -> Tensor:
        """Run the chunk without labels: the loss is the schedule's business here."""
        first = self.chunk.embedding is not None
        out = self.chunk(None if first else x, Microbatch(0, 1, 0, {"tokens": x} if first else {}))
        result: Tensor = out.logits if out.x is None else out.x
        return result


class SplitBackward:
    """Hands the weight gradients of each input gradient to the schedule, as the function that finishes them."""

    def __init__(self, gradients: GradientAccumulator) -> None:
        self._gradients, self._count, self._open = gradients, 0, ExitStack()

    def start(self) -> None:
        """Keep back the weight gradients from here on."""
        self._open.enter_context(self._gradients.deferring((self._count, 0)))

    def stop(self) -> None:
        """Compute weight gradients at once again."""
        self._open.close()

    def finisher(self) -> Callable[[], None]:
        """The work that was kept back since the last call, to be computed when the schedule says: a ``dw_builder``."""
        key = (self._count, 0)
        self.stop()
        self._count += 1
        self.start()

        def finish() -> None:
            self.stop()
            self._gradients.run_deferred(key)
            self.start()

        return finish


class TorchStep:
    """A step of ``stage`` by torch's schedule ``name``; with ``keep_outputs`` it returns the logits of all samples."""

    def __init__(self, stage: Stage, name: str, *, keep_outputs: bool = False) -> None:
        from torch.distributed.pipelining import schedules  # which loads the compiler

        self._stage, self._keep = stage, keep_outputs
        self._split = SplitBackward(stage.gradients) if name in SPLITTING else None
        count = len(stage.layout)
        pieces = [self._piece(chunk, position) for position, chunk in zip(stage.positions, stage.chunks, strict=True)]
        made: Any = getattr(schedules, name)
        given = pieces[0] if name in SINGLE else pieces
        self._schedule = made(given, stage.shape.microbatches, loss_fn=self._loss, scale_grads=False)
        self._arguments: Sequence[Tensor] = (stage.tokens,) if 0 in stage.positions else ()
        self._target = stage.labels if count - 1 in stage.positions else None

    def __call__(self) -> None:
        """Accumulate the gradients of one step."""
        if self._split:
            self._split.start()
        losses: list[Tensor] = []
        self._schedule.step(*self._arguments, target=self._target, losses=losses, return_outputs=self._keep)
        if self._split:
            self._split.stop()
        self._stage.losses = [loss.detach() for loss in losses]

    def _piece(self, chunk: DecoderChunk, position: int) -> PipelineStage:
        """The stage object of one chunk. With examples torch need not run the chunk to learn its shapes."""
        from torch.distributed.pipelining import PipelineStage

        tokens, count = self._stage.tokens[: self._stage.shape.micro_batch], len(self._stage.layout)
        x = torch.empty(self._stage.boundary.resolve(), requires_grad=True)
        logits = torch.empty(*x.shape[:2], self._stage.shape.vocab, requires_grad=True)
        return PipelineStage(
            Piece(chunk),
            position,
            count,
            torch.device("cpu"),
            input_args=tokens if position == 0 else x,
            output_args=logits if position == count - 1 else x,
            dw_builder=self._split.finisher if self._split else None,
        )

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits [s, b, v], labels [b, s] -> the microbatch's share of the mean loss."""
        head = next(chunk for chunk in self._stage.chunks if chunk.cross_entropy is not None)
        assert head.cross_entropy is not None
        loss: Tensor = head.cross_entropy(logits, labels).sum() * self._stage.loss_scale
        return loss
