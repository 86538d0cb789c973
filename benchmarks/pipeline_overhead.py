"""What the executor itself costs: its time per action beyond the calls that any loop would make.

Chunks of one multiplication each, so that nearly everything is bookkeeping. Without messages the same calls are timed
in a bare loop over the same chunks; with messages there is nothing to subtract, and the time of a bare exchange of
the same tensors between the two ranks stands beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline_quiet import take_sample
from megatron_run.actions import Action, LayoutSpec, ScheduleSpec, looped_layout
from megatron_run.comm import Channels, create_groups
from megatron_run.contracts import Boundary, ChunkOut, Microbatch, Segment
from megatron_run.gradients import Gradients, build_buckets
from megatron_run.parameters import describe_parameters
from megatron_run.pipeline.execute import Executor, StepInputs
from megatron_run.pipeline.lower import lower
from megatron_run.pipeline.messages import Messenger
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import verify
from megatron_run.topology import Sizes, Topology
from megatron_run.training.programs import LOOKAHEAD
from megatron_run_schedule_1f1b import OneForwardOneBackward

CHUNKS = 4
BOUNDARY = Boundary((8,), torch.float32)
CPU = torch.device("cpu")


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


def measure_overhead(microbatches: int, samples: int) -> dict[str, float]:
    """Microseconds per action: of the executor alone (rank 0 by itself), and with messages between two ranks."""
    dist.barrier()
    groups = create_groups(Topology(Sizes(pipeline=2), dist.get_rank()), dist.default_pg_timeout)
    assert groups.channels is not None
    found = {"alone": 0.0, "bare": 0.0}
    if dist.get_rank() == 0:
        found = _alone(microbatches, samples)
    dist.barrier()
    actions = 2 * microbatches
    found["with_messages"] = _with_messages(groups.channels, microbatches, samples) / actions * 1e6
    found["bare_exchange"] = _exchange(groups.channels, microbatches, samples) / actions * 1e6
    return found


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
    run = _runner(plan, 0, gradients, chunks, Messenger(None, [0], CPU))
    bare: list[float] = []
    alone: list[float] = []
    for _ in range(samples + 1):
        alone.append(_seconds(run))
        gradients.start_step(microbatches, lambda _: None)
        bare.append(_seconds(lambda: _bare_loop(chunks, microbatches)))
    per = {"alone": alone[1:], "bare": bare[1:]}
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


def _with_messages(channels: Channels, microbatches: int, samples: int) -> float:
    """Seconds of a step of 1F1B over two ranks."""
    rank, layout = dist.get_rank(), looped_layout(LayoutSpec(2, 1, 2))
    spec = ScheduleSpec(layout, 2, 1, microbatches)
    plan = verify(spec, OneForwardOneBackward().actions(spec))
    gradients, chunks = _chunks([rank], 1)
    run = _runner(plan, rank, gradients, chunks, Messenger(channels, [0, 1], CPU))
    return statistics.median([take_sample(run).seconds for _ in range(samples + 1)][1:])


def _exchange(channels: Channels, microbatches: int, samples: int) -> float:
    """Seconds of sending a tensor there and another one back, ``microbatches`` times."""
    rank, tensor = dist.get_rank(), torch.zeros(BOUNDARY.resolve())

    def exchange() -> None:
        for _ in range(microbatches):
            for sender, group in ((0, channels.up), (1, channels.down)):
                if rank == sender:
                    dist.send(tensor, 1 - rank, group=group)
                else:
                    dist.recv(tensor, 1 - rank, group=group)

    return statistics.median([take_sample(exchange).seconds for _ in range(samples + 1)][1:])


def _chunks(positions: Sequence[int], last: int) -> tuple[Gradients, list[Scale]]:
    gradients, chunks = Gradients(), [Scale(last=position == last) for position in positions]
    infos = [describe_parameters(chunk) for chunk in chunks]
    build_buckets(infos, 1)
    for described in infos:
        for parameter, info in described.items():
            gradients.adopt(parameter, info.name)
    return gradients, chunks


def _runner(
    plan: Plan, stage: int, gradients: Gradients, chunks: Sequence[Scale], messenger: Messenger
) -> Callable[[], None]:
    executor, program = Executor(chunks, gradients, messenger, stage), lower(plan, stage, LOOKAHEAD)
    inputs = StepInputs(
        microbatch=lambda m: Microbatch(m, 1, m, {}),
        boundary=lambda _: BOUNDARY,
        report=lambda *_: None,
        seed=lambda _, weight: weight,
    )

    def run() -> None:
        gradients.start_step(plan.microbatches, lambda _: None)
        executor.run(program, inputs)

    return run


def _seconds(call: Callable[[], None]) -> float:
    """Processor time, which other work does not lengthen as much: nothing waits here."""
    start = time.process_time()
    call()
    return time.process_time() - start
