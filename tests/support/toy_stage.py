"""One stage of the toy model under the real executor, and what differs from plain autograd after a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megatron_run.contracts import Boundary, Microbatch
from megatron_run.contracts.schedule import Action
from megatron_run.pipeline.lower import Instruction, lower
from megatron_run.pipeline.plan import Plan
from megatron_run_engine.optim.buckets import build_buckets
from megatron_run_engine.runtime.execute import Executor, StepInputs, StepRecord
from megatron_run_engine.runtime.gradients import GradientAccumulator, main_grad
from megatron_run_engine.runtime.messages import Messenger
from megatron_run_engine.runtime.parameter_init import describe_parameters
from tests.support.toy_chunks import PairedChunk, ToyChunk, by_autograd, toy_boundary
from tests.support.witness import Witness


class Bench:
    """One stage of the toy model with its executor, under the eyes of a witness.

    ``synced``: for each gradient sync, how many actions had been computed when it was started, and its chunk.
    """

    def __init__(
        self,
        plan: Plan,
        stage: int,
        messenger: Messenger,
        *,
        make_chunk: Callable[..., ToyChunk] = ToyChunk,
        thinning: bool = False,
        paired: bool = False,
    ) -> None:
        self.plan, self.stage, gradients = plan, stage, GradientAccumulator()
        self.boundary = partial(toy_boundary, thinning=thinning, paired=paired)
        mine = sorted((place.chunk, k) for k, place in enumerate(plan.layout) if place.stage == stage)
        make_chunk = PairedChunk if paired else make_chunk
        self.chunks = [make_chunk(k, k == len(plan.layout) - 1, gradients, thinning=thinning) for _, k in mine]
        infos = [describe_parameters(chunk) for chunk in self.chunks]
        build_buckets(infos, 1, torch.float64)
        for described in infos:
            for parameter, info in described.items():
                gradients.adopt(parameter, info.name)
        gradients.start_step(plan.microbatches, lambda _: None)
        self.executor, self.witness = (
            Executor(self.chunks, gradients, messenger, stage),
            Witness(self.chunks, gradients),
        )
        self.losses, self.synced = [0.0], list[tuple[int, int]]()

    def run(
        self,
        boundary: Callable[[Microbatch], Boundary] | None = None,
        lookahead: int | None = 1,
        alter: Callable[[Instruction], Instruction] = lambda instruction: instruction,
    ) -> StepRecord:
        """One step; ``boundary`` declares something else than what the chunks return, ``alter`` spoils the program."""
        inputs = StepInputs(
            microbatch=lambda m: Microbatch(m, 1, m, {"tokens": torch.zeros(1, 2)}),
            boundary=boundary or self.boundary,
            report=lambda _, __, total, ___: self.losses.append(total.item()),
            seed=lambda _, weight: weight.double(),
            start_grad_sync=lambda chunk: self.synced.append((len(self.witness.actions), chunk)),
        )
        return self.executor.run([alter(each) for each in lower(self.plan, self.stage, lookahead)], inputs)


def faults(
    plan: Plan,
    stage: int,
    messenger: Messenger,
    lookahead: int | None = 1,
    *,
    thinning: bool = False,
    paired: bool = False,
    **spoiled: Any,
) -> list[str]:
    """Run one plan on this stage and say what differs from plain autograd and from the plan."""
    bench, wrong = Bench(plan, stage, messenger, thinning=thinning, paired=paired), list[str]()
    record = bench.run(lookahead=lookahead, **spoiled)
    losses, weights, shifts = by_autograd(len(plan.layout), plan.microbatches, thinning=thinning, paired=paired)
    for chunk in bench.chunks:
        for name, parameter, expected in (("A", chunk.weight, weights), ("shift", chunk.shift, shifts)):
            if not torch.allclose(main_grad(parameter), expected[chunk.position], rtol=1e-12, atol=1e-12):
                wrong.append(f"gradient of {name} at position {chunk.position}")
        if chunk.last and abs(sum(bench.losses) - sum(losses)) > 1e-12:
            wrong.append("losses")
    if record.executed != list(plan.lists[stage]) or bench.witness.actions != computed(plan, stage):
        wrong.append("order")
    if record.peak_in_flight != plan.peak_in_flight[stage]:
        wrong.append(f"peak {record.peak_in_flight}, planned {plan.peak_in_flight[stage]}")
    if bench.synced != syncs(plan, stage):
        wrong.append(f"gradient syncs {bench.synced}")
    if messenger._sent:
        wrong.append(f"{len(messenger._sent)} sends left")
    return wrong


def computed(plan: Plan, stage: int) -> list[Action]:
    """The planned actions that compute something."""
    return [action for action in plan.lists[stage] if action.op != "S"]


def syncs(plan: Plan, stage: int) -> list[tuple[int, int]]:
    """When each chunk's gradients are to be synchronised, in order: right after its last one, or at its S."""
    done, when = 0, dict[int, int]()
    asked = {action.chunk for action in plan.lists[stage] if action.op == "S"}
    for action in plan.lists[stage]:
        done += action.op != "S"
        if action.op in ("S" if action.chunk in asked else "BW"):
            when[action.chunk] = done
    return sorted((done, chunk) for chunk, done in when.items())
