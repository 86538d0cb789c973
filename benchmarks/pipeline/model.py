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

from benchmarks.pipeline.schedules import executed, step_inputs
from megatron_run.contracts import Microbatch
from megatron_run.contracts.schedule import Place
from megatron_run.pipeline.plan import Plan
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.nn import DecoderChunk
from megatron_run_engine.runtime.comm import Groups
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_testing.build_contexts import logical_gradients, prepare, single_process_context

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
TINY = Shape(hidden=16, heads=2, sequence=8, vocab=128, micro_batch=2, microbatches=4)
SHAPES = {"small": SMALL, "tiny": TINY}


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
        places = sorted((place.chunk, index) for index, place in enumerate(layout) if place.stage == rank)
        self.positions = [position for _, position in places]
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


def our_step(stage: Stage, plan: Plan, groups: Groups) -> Callable[[], object]:
    """A step of ``stage`` under ``plan`` by the executor, over the process groups ``groups``."""
    b, mask = stage.shape.micro_batch, torch.ones(stage.shape.micro_batch, stage.shape.sequence)

    def microbatch(index: int) -> Microbatch:
        samples = slice(index * b, (index + 1) * b)
        fields = {"tokens": stage.tokens[samples], "labels": stage.labels[samples], "loss_mask": mask}
        return Microbatch(index, 1, index * b, fields)

    inputs = step_inputs(
        stage.boundary,
        microbatch,
        report=lambda _, __, total, ___: stage.losses.append(total * stage.loss_scale),
        seed=lambda _, __: stage.loss_scale,
    )
    return executed(plan, stage.rank, stage.chunks, stage.gradients, groups.channels, inputs)
