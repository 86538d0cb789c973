"""One stage of the toy model under the real executor, and what differs from plain autograd after a step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_run.contracts import Boundary, Microbatch
from megatron_run.gradients import Gradients, build_buckets, main_grad
from megatron_run.parameters import describe_parameters
from megatron_run.pipeline.execute import Executor, StepInputs, StepRecord
from megatron_run.pipeline.lower import lower
from megatron_run.pipeline.messages import Messenger
from megatron_run.pipeline.plan import Plan
from tests.support.toy_chunks import BOUNDARY, ToyChunk, by_autograd, thinning_boundary


def known_boundary(microbatch: Microbatch) -> Boundary:
    """What the toy model declares."""
    return BOUNDARY


class Bench:
    """One stage of the toy model with its executor."""

    def __init__(
        self,
        plan: Plan,
        stage: int,
        messenger: Messenger,
        *,
        thinning: bool = False,
        make_chunk: Callable[..., ToyChunk] = ToyChunk,
    ) -> None:
        self.plan, self.stage, self.thinning, gradients = plan, stage, thinning, Gradients()
        mine = sorted((place.chunk, k) for k, place in enumerate(plan.layout) if place.stage == stage)
        self.chunks = [make_chunk(k, k == len(plan.layout) - 1, gradients, thinning=thinning) for _, k in mine]
        infos = [describe_parameters(chunk) for chunk in self.chunks]
        build_buckets(infos, 1, torch.float64)
        for described in infos:
            for parameter, info in described.items():
                gradients.adopt(parameter, info.name)
        gradients.start_step(plan.microbatches, lambda _: None)
        self.executor, self.losses, self.synced = Executor(self.chunks, gradients, messenger, stage), [0.0], list[int]()

    def run(self, boundary: Callable[[Microbatch], Boundary] | None = None, lookahead: int | None = 1) -> StepRecord:
        """One step; ``boundary`` declares something else than what the chunks return."""
        inputs = StepInputs(
            microbatch=lambda m: Microbatch(m, 1, m, {}),
            boundary=boundary or (thinning_boundary if self.thinning else known_boundary),
            report=lambda _, total, __: self.losses.append(total.item()),
            seed=lambda _, weight: weight.double(),
            start_grad_sync=self.synced.append,
        )
        return self.executor.run(lower(self.plan, self.stage, lookahead), inputs)


def faults(
    plan: Plan, stage: int, messenger: Messenger, lookahead: int | None = 1, *, thinning: bool = False
) -> list[str]:
    """Run one plan on this stage and say what differs from plain autograd and from the plan."""
    bench, wrong = Bench(plan, stage, messenger, thinning=thinning), list[str]()
    record = bench.run(lookahead=lookahead)
    losses, weights, shifts = by_autograd(len(plan.layout), plan.microbatches, thinning=thinning)
    for chunk in bench.chunks:
        for name, parameter, expected in (("A", chunk.weight, weights), ("shift", chunk.shift, shifts)):
            if not torch.allclose(main_grad(parameter), expected[chunk.position], rtol=1e-12, atol=1e-12):
                wrong.append(f"gradient of {name} at position {chunk.position}")
        if chunk.last and abs(sum(bench.losses) - sum(losses)) > 1e-12:
            wrong.append("losses")
    if tuple(record.executed) != tuple(plan.lists[stage]):
        wrong.append("order")
    if record.peak_in_flight != plan.peak_in_flight[stage]:
        wrong.append(f"peak {record.peak_in_flight}, planned {plan.peak_in_flight[stage]}")
    if sorted(bench.synced) != list(range(len(bench.chunks))):
        wrong.append(f"gradient syncs {bench.synced}")
    if messenger.unretired:
        wrong.append(f"{messenger.unretired} sends left")
    return wrong
