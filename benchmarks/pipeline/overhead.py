"""The cost of the executor itself: its time per action beyond the calls that any loop would make.

Chunks of one multiplication each, so that nearly everything is bookkeeping, timed in turns with a bare loop that makes
the same calls: first on one stage, where nothing is sent, then as 1F1B over two ranks, with the same messages.
Processor time, of all ranks: it holds no waiting, and other work on the machine does not lengthen it as much.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline.schedules import executed, make_plan, step_inputs
from benchmarks.support.quiet import take_sample, undisturbed
from benchmarks.support.ranks import on_ranks
from benchmarks.support.report import table
from megatron_run.contracts import Boundary, ChunkOut, Microbatch, Segment
from megatron_run.contracts.schedule import Action, LayoutSpec, ScheduleSpec, looped_layout
from megatron_run.contracts.topology import Sizes, Topology
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import verify
from megatron_run_engine.optim.buckets import build_buckets
from megatron_run_engine.runtime.comm import Channels, create_groups
from megatron_run_engine.runtime.gradients import GradientAccumulator
from megatron_run_engine.runtime.parameter_init import describe_parameters

CHUNKS = 4
BOUNDARY = Boundary((8,), torch.float32)


class Scale(nn.Module):
    """``x * weight``: the least a chunk with a parameter can do."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.last, self.weight = last, nn.Parameter(torch.ones(BOUNDARY.resolve()))
        self.one = torch.ones(())

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> ChunkOut:
        """[8] -> [8], or a loss."""
        y = self.weight * (self.one if x is None else x)
        return ChunkOut(None, {"lm": (y.sum(), self.one)}) if self.last else ChunkOut(y)

    def segments(self) -> Sequence[Segment]:
        """None: there is nothing to capture."""
        return ()


def measure_overhead(microbatches: int, samples: int) -> dict[str, Any]:
    """Microseconds an action without messages (rank 0 by itself); samples of steps with them, and their actions."""
    dist.barrier()
    groups = create_groups(Topology(Sizes(pipeline=2), dist.get_rank()), dist.default_pg_timeout)
    assert groups.channels is not None
    alone = _alone(microbatches, samples) if dist.get_rank() == 0 else {}
    dist.barrier()
    return {**alone, "actions": 4 * microbatches, "samples": _with_messages(groups.channels, microbatches, samples)}


def _alone(microbatches: int, samples: int) -> dict[str, float]:
    """One stage, each microbatch forward and backward through all chunks, against a bare loop; in turns."""
    layout = looped_layout(LayoutSpec(1, CHUNKS, CHUNKS))
    actions = [
        Action(op, m, chunk)  # type: ignore[arg-type]  # one of two letters
        for m in range(microbatches)
        for op, chunks in (("F", range(CHUNKS)), ("B", range(CHUNKS)[::-1]))
        for chunk in chunks
    ]
    plan = verify(ScheduleSpec(layout, 1, CHUNKS, microbatches), [actions])
    gradients, chunks = _chunks(range(CHUNKS), CHUNKS - 1)
    run = _runner(plan, 0, gradients, chunks, None)
    bare: list[float] = []
    alone: list[float] = []
    for _ in range(samples + 1):
        alone.append(_seconds(run))
        gradients.start_step(microbatches, lambda _: None)
        bare.append(_seconds(lambda: _bare_loop(chunks, microbatches)))
    per = {"executor": alone[1:], "bare": bare[1:]}
    return {name: statistics.median(times) / len(actions) * 1e6 for name, times in per.items()}


def _bare_loop(chunks: Sequence[Scale], microbatches: int) -> None:
    """The same calls as the executor's, with nothing around them."""
    for m in range(microbatches):
        microbatch, held = Microbatch(m, 1, m, {}), list[tuple[Tensor | None, Tensor]]()
        x: Tensor | None = None
        for chunk in chunks:
            out = chunk(x, microbatch)
            y = out.losses["lm"][0] if out.x is None else out.x
            held.append((x, y))
            x = y.detach().requires_grad_()
        gradient: Tensor | None = chunks[-1].one
        for x, y in reversed(held):
            torch.autograd.backward([y], [gradient])
            gradient = None if x is None else x.grad


def _with_messages(channels: Channels, microbatches: int, samples: int) -> list[dict[str, float]]:
    """Samples of 1F1B over two ranks, ``executor_processor`` seconds against ``bare_processor``; in turns."""
    rank, plan = dist.get_rank(), make_plan("1f1b", 2, microbatches)
    gradients, chunks = _chunks([rank], 1)
    run = _runner(plan, rank, gradients, chunks, channels)
    taken: list[dict[str, float]] = []
    for _ in range(samples + 1):
        sides = {"executor": asdict(take_sample(run))}
        gradients.start_step(microbatches, lambda _: None)
        sides["bare"] = asdict(take_sample(_BareStage(channels, chunks[0], microbatches).step))
        taken.append({f"{of}_{key}": each[key] for of, each in sides.items() for key in each})
    return taken[1:]


class _BareStage:
    """1F1B of one chunk a stage as one would write it for two ranks: the same calls and messages, nothing around."""

    def __init__(self, channels: Channels, chunk: Scale, microbatches: int) -> None:
        self._chunk, self._microbatches, self._rank = chunk, microbatches, dist.get_rank()
        both = (channels.up, channels.down)
        self._out, self._in = both if self._rank == 0 else reversed(both)
        self._expected: list[tuple[Tensor, Any]] = []
        self._held: list[tuple[Tensor | None, Tensor]] = []
        self._sent: list[tuple[Tensor, Any]] = []

    def step(self) -> None:
        """Forwards and backwards in turns; the first stage is one forward ahead."""
        self._post()
        for m in range(self._microbatches):
            self._forward(m)
            if m or self._rank:
                self._backward(more=True)
        if not self._rank:
            self._backward(more=False)
        for _, work in self._sent:
            work.wait()

    def _forward(self, m: int) -> None:
        x = self._receive(more=m + 1 < self._microbatches).requires_grad_() if self._rank else None
        out = self._chunk(x, Microbatch(m, 1, m, {}))
        self._held.append((x, out.losses["lm"][0] if out.x is None else out.x))
        if out.x is not None:
            self._send(out.x.detach())

    def _backward(self, *, more: bool) -> None:
        x, y = self._held.pop(0)
        torch.autograd.backward([y], [self._receive(more=more) if x is None else self._chunk.one])
        if x is not None and x.grad is not None:
            self._send(x.grad)

    def _send(self, tensor: Tensor) -> None:
        """Start sending; the tensor is held until two later ones are on their way."""
        self._sent.append((tensor, dist.isend(tensor, 1 - self._rank, group=self._out)))
        if len(self._sent) > 2:
            self._sent.pop(0)[1].wait()

    def _post(self) -> None:
        tensor = torch.empty(BOUNDARY.resolve(), dtype=BOUNDARY.dtype)
        self._expected.append((tensor, dist.irecv(tensor, 1 - self._rank, group=self._in)))

    def _receive(self, *, more: bool) -> Tensor:
        """The next tensor; if there are ``more``, the one after it is awaited from now on, as the executor does."""
        tensor, work = self._expected.pop()
        if more:
            self._post()
        work.wait()
        return tensor


def _chunks(positions: Sequence[int], last: int) -> tuple[GradientAccumulator, list[Scale]]:
    gradients, chunks = GradientAccumulator(), [Scale(last=position == last) for position in positions]
    infos = [describe_parameters(chunk) for chunk in chunks]
    build_buckets(infos, 1)
    for described in infos:
        for parameter, info in described.items():
            gradients.adopt(parameter, info.name)
    return gradients, chunks


def _runner(
    plan: Plan, stage: int, gradients: GradientAccumulator, chunks: Sequence[Scale], channels: Channels | None
) -> Callable[[], None]:
    step = executed(plan, stage, chunks, gradients, channels, step_inputs(BOUNDARY))

    def run() -> None:
        gradients.start_step(plan.microbatches, lambda _: None)
        step()

    return run


def _seconds(call: Callable[[], None]) -> float:
    """Processor time of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def report(*, quick: bool) -> Iterator[str]:
    """Measure, and tell what was found: microseconds an action, with what a bare loop takes beside it."""
    yield "\n## The executor's own time, processor time\n"
    found = on_ranks(measure_overhead, 2, {"microbatches": 500, "samples": 5 if quick else 15})
    kept = undisturbed(found["samples"])
    executor, bare = (
        statistics.median(sample[f"{of}_processor"] for sample in kept.samples) / found["actions"] * 1e6
        for of in ("executor", "bare")
    )
    rows = (
        ("one stage, 4 chunks, no messages", found["executor"], found["bare"], "all"),
        ("two stages, 1f1b, a message an action", executor, bare, str(kept)),
    )
    columns = ("", "executor, us an action", "bare loop, us", "difference, us", "samples used")
    yield from table(columns, ((name, f"{a:.0f}", f"{b:.0f}", f"{a - b:.0f}", used) for name, a, b, used in rows))
