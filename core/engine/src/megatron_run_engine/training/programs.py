"""One stage's instructions for every number of microbatches, lowered once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.pipeline.forward_only import forward_plan
from megatron_run.pipeline.lower import lower

if TYPE_CHECKING:
    import torch

    from megatron_run.pipeline.lower import Instruction
    from megatron_run.pipeline.plan import Plan
    from megatron_run.planning import ResolvedRun

#: How many actions early a receive is posted where each direction between two stages has a channel of its own.
LOOKAHEAD = 1


class Programs:
    """The programs of ``stage``. On NCCL every message is issued at its place in one global order instead."""

    def __init__(self, run: ResolvedRun, stage: int, device: torch.device) -> None:
        self._run, self._stage = run, stage
        self._lookahead = None if device.type == "cuda" else LOOKAHEAD
        self._training: dict[int, tuple[Instruction, ...]] = {}
        self._forward_only: dict[int, tuple[Instruction, ...]] = {}

    def training(self, microbatches: int) -> tuple[Instruction, ...]:
        """A step of ``microbatches``, as the schedule planned it."""
        if microbatches not in self._training:
            self._training[microbatches] = self._lower(self._run.plans[microbatches])
        return self._training[microbatches]

    def forward_only(self, microbatches: int) -> tuple[Instruction, ...]:
        """``microbatches`` forward and nothing else, by the kernel's own plan."""
        if microbatches not in self._forward_only:
            stages, chunks = self._run.sizes.pipeline, self._run.config.parallel.chunks
            self._forward_only[microbatches] = self._lower(forward_plan(self._run.layout, stages, chunks, microbatches))
        return self._forward_only[microbatches]

    def _lower(self, plan: Plan) -> tuple[Instruction, ...]:
        return lower(plan, self._stage, self._lookahead)
