"""The two sides of a comparison: a schedule of ours and one of a peer, over the very same chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from benchmarks.pipeline.model import STAGES, Shape, Stage, our_step
from benchmarks.pipeline.peers.megatron import MegatronStep
from benchmarks.pipeline.peers.torch import TorchStep
from benchmarks.pipeline.schedules import FOLD, SCHEDULES, LayerCounts, make_plan
from benchmarks.support.megatron import NAME as MEGATRON
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.pipeline.plan import Plan
from megatron_run_engine.runtime.comm import create_groups


@dataclass(frozen=True)
class Side:
    """One side of a comparison: ``step`` accumulates into the gradients of ``stage``."""

    stage: Stage
    step: Callable[[], object]

    def results(self) -> dict[str, Tensor]:
        """Losses and gradients of one step, of all ranks, by name."""
        self.stage.clear()
        self.step()
        gathered: list[dict[str, Tensor] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.stage.results())
        return {name: tensor for one in gathered if one for name, tensor in one.items()}


class Sides:
    """Makes sides; those with the same split of the layers share their stage, which no step leaves anything in."""

    def __init__(self, shape: Shape) -> None:
        self._shape, self._rank = shape, dist.get_rank()
        self._groups = create_groups(Topology(Sizes(pipeline=STAGES), self._rank), dist.default_pg_timeout)
        self._stages: dict[LayerCounts, Stage] = {}

    def own(self, name: str) -> Side:
        """Schedule ``name`` of this project, on its own split."""
        stage = self._stage(SCHEDULES[name].split)
        return Side(stage, our_step(stage, self._plan(name), self._groups))

    def peer(self, name: str, split: LayerCounts, *, keep_outputs: bool = False) -> Side:
        """Schedule ``name`` of a peer, with the layers split by ``split``."""
        stage = self._stage(split)
        if name == MEGATRON:
            return Side(stage, MegatronStep(stage))
        return Side(stage, TorchStep(stage, name, keep_outputs=keep_outputs))

    def _plan(self, name: str) -> Plan:
        return make_plan(name, STAGES, self._shape.microbatches, SCHEDULES[name].split.counts)

    def _stage(self, split: LayerCounts) -> Stage:
        if split not in self._stages:
            name = next(name for name, entry in SCHEDULES.items() if entry.split == split)
            self._stages[split] = Stage(self._plan(name).layout, self._rank, self._shape)
        return self._stages[split]


def loss_stage(split: LayerCounts) -> int:
    """The stage that has the head: the first where the places go down the stages and back up."""
    return 0 if split == FOLD else STAGES - 1
