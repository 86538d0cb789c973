"""One stage of the model that pipelines are compared with, and a step of it by this project's executor.

Both sides of a comparison run the same chunks: they share parameters, kernels and ``main_grad``, so that only the
schedule, the messages and the bookkeeping differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_run.actions import LayoutSpec, Place, ScheduleSpec
from megatron_run.builtin.model.gpt import Gpt, GptOptions
from megatron_run.builtin.parallel_layer.dense import DenseLayers
from megatron_run.comm import Groups
from megatron_run.contracts import Microbatch, Schedule
from megatron_run.gradients import main_grad
from megatron_run.nn import DecoderChunk
from megatron_run.pipeline.execute import Executor, StepInputs
from megatron_run.pipeline.lower import lower
from megatron_run.pipeline.messages import Messenger
from megatron_run.pipeline.plan import Plan
from megatron_run.pipeline.verify import verify
from megatron_run.testing.context import logical_gradients, prepare, single_process_context
from megatron_run.training.programs import LOOKAHEAD
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_gpipe import GPipe
from megatron_run_schedule_interleaved import Interleaved
from megatron_run_schedule_zero_bubble import ZeroBubbleH1, ZeroBubbleV

STAGES = 2


@dataclass(frozen=True)
class Shape:
    """The sizes of the network and of a step: ``microbatches`` of ``micro_batch`` sequences."""

    hidden: int
    heads: int
    sequence: int
    vocab: int
    micro_batch: int
    microbatches: int


SMALL = Shape(hidden=384, heads=6, sequence=256, vocab=8192, micro_batch=4, microbatches=8)
HALF = Shape(hidden=192, heads=6, sequence=128, vocab=4096, micro_batch=4, microbatches=8)
TINY = Shape(hidden=16, heads=2, sequence=8, vocab=128, micro_batch=2, microbatches=4)


@dataclass(frozen=True)
class Ours:
    """A schedule of this project and how it splits the layers.

    ``counts`` are the layers of each place. The head weighs about as much as two layers, so the last place gets fewer
    and the two stages have about the same work.
    """

    schedule: Callable[[], Schedule]
    counts: tuple[int, ...]


ONE_CHUNK, LOOPED, FOLDED = (4, 2), (2, 1, 2, 1), (1, 2, 2, 1)
SCHEDULES = {
    "gpipe": Ours(GPipe, ONE_CHUNK),
    "1f1b": Ours(OneForwardOneBackward, ONE_CHUNK),
    "interleaved": Ours(Interleaved, LOOPED),
    "zb-h1": Ours(ZeroBubbleH1, ONE_CHUNK),
    "zb-v": Ours(ZeroBubbleV, FOLDED),
}


def make_plan(ours: Ours, microbatches: int) -> Plan:
    """The proven plan of ``ours`` over two stages."""
    schedule, chunks = ours.schedule(), len(ours.counts) // STAGES
    layout = schedule.layout(LayoutSpec(STAGES, chunks, sum(ours.counts), ours.counts))
    spec = ScheduleSpec(layout, STAGES, chunks, microbatches)
    return verify(spec, schedule.actions(spec))


class Stage:
    """The chunks of stage ``rank`` of ``layout`` with their gradients, and the tokens and labels of a step.

    ``chunks`` and ``positions`` are in the order of chunk numbers; tokens and labels are [M * b, s].
    """

    def __init__(self, layout: tuple[Place, ...], rank: int, shape: Shape) -> None:
        self.layout, self.rank, self.shape = layout, rank, shape
        layers = sum(len(place.layers) for place in layout)
        options = GptOptions(
            num_layers=layers,
            hidden_size=shape.hidden,
            num_heads=shape.heads,
            vocab_size=shape.vocab,
            tie_embeddings=False,
            dropout=0.0,
        )
        train = {"sequence_length": shape.sequence, "micro_batch_size": shape.micro_batch}
        train["global_batch_size"] = shape.micro_batch * shape.microbatches
        context = single_process_context(options, dtype=torch.float32, train=train)
        self.gradients, model, dense = context.gradients, Gpt(context, options), DenseLayers(context)
        mine = sorted((place.chunk, index) for index, place in enumerate(layout) if place.stage == rank)
        self.positions = [position for _, position in mine]
        built = [model.build_chunk(position, layout, dense, {}) for position in self.positions]
        self.chunks = [chunk for chunk in built if isinstance(chunk, DecoderChunk)]
        self.infos = prepare(context, self.chunks)
        self.boundary = model.boundary(Microbatch(0, 1, 0, {}), shape.micro_batch, shape.sequence)
        generator = torch.Generator().manual_seed(1)
        samples = (shape.micro_batch * shape.microbatches, shape.sequence)
        self.tokens, self.labels = (torch.randint(shape.vocab, samples, generator=generator) for _ in range(2))
        self.losses: list[Tensor] = []

    @cached_property
    def loss_scale(self) -> Tensor:
        """One over the tokens of a step: what a sum of losses is multiplied with."""
        return torch.tensor(1.0 / self.tokens.numel())

    def clear(self) -> None:
        """Forget gradients and losses: no part of the time of a step."""
        for parameter in self.infos:
            main_grad(parameter).zero_()
        self.losses = []
        self.gradients.start_step(self.shape.microbatches, lambda _: None)

    def results(self) -> dict[str, Tensor]:
        """The gradients of this stage by name, and on the stage that has them the losses in microbatch order."""
        losses = {"losses": torch.stack(self.losses)} if self.losses else {}
        return logical_gradients(self.infos) | losses


class OurStep:
    """A step of ``stage`` under ``plan`` by the executor, over the process groups ``groups``."""

    def __init__(self, stage: Stage, plan: Plan, groups: Groups) -> None:
        self._stage, b = stage, stage.shape.micro_batch
        messenger = Messenger(groups.channels, range(STAGES), torch.device("cpu"))
        self._executor = Executor(stage.chunks, stage.gradients, messenger, stage.rank)
        self._program = lower(plan, stage.rank, LOOKAHEAD)
        mask = torch.ones(b, stage.shape.sequence)

        def microbatch(index: int) -> Microbatch:
            samples = slice(index * b, (index + 1) * b)
            fields = {"tokens": stage.tokens[samples], "labels": stage.labels[samples], "loss_mask": mask}
            return Microbatch(index, 1, index * b, fields)

        self._inputs = StepInputs(
            microbatch=microbatch,
            boundary=lambda _: stage.boundary,
            report=lambda _, total, __: stage.losses.append(total * stage.loss_scale),
            seed=lambda _, __: stage.loss_scale,
        )

    def __call__(self) -> None:
        """Accumulate the gradients of one step."""
        self._executor.run(self._program, self._inputs)
