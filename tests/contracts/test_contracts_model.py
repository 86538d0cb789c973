"""The suite of kind model sees what a wrong one does."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_run.contracts import Boundary, Chunk, ChunkOut, Microbatch, ParallelLayers
from megatron_run.contracts.schedule import Place
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_testing.model import model_checks
from tests.contracts.conformance import SMALL, failures

OPTIONS = GptOptions.model_validate(SMALL["model"])


class WrongBoundary(Gpt):
    def boundary(self, microbatch: Microbatch, micro_batch_size: int, sequence_length: int) -> Boundary:
        right = super().boundary(microbatch, micro_batch_size, sequence_length)
        return replace(right, dtype=torch.bfloat16)


class WholeSequence(Gpt):
    """Forgets that ranks may split the sequence."""

    def boundary(self, microbatch: Microbatch, micro_batch_size: int, sequence_length: int) -> Boundary:
        right = super().boundary(microbatch, micro_batch_size, sequence_length)
        return replace(right, shape=(sequence_length, *right.shape[1:]))


class ForgetsMemory(Gpt):
    """Declares a tensor beside the stream, and sends none."""

    def boundary(self, microbatch: Microbatch, micro_batch_size: int, sequence_length: int) -> Boundary:
        right = super().boundary(microbatch, micro_batch_size, sequence_length)
        return replace(right, beside={"memory": right})


class ForgetsTokens(Gpt):
    def fields(self, position: int, layout: tuple[Place, ...]) -> tuple[str, ...]:
        return tuple(name for name in super().fields(position, layout) if name != "loss_mask")


class NumbersLayersByChunk(Gpt):
    """Every chunk counts its layers from 0."""

    def build_chunk(
        self, position: int, layout: tuple[Place, ...], layers: ParallelLayers, shared: dict[str, nn.Parameter]
    ) -> Chunk:
        local = tuple(place._replace(layers=range(len(place.layers))) for place in layout)
        return super().build_chunk(position, local, layers, shared)


class TiesNothing(Gpt):
    """Copies on one stage that do not know of each other."""

    def build_chunk(
        self, position: int, layout: tuple[Place, ...], layers: ParallelLayers, shared: dict[str, nn.Parameter]
    ) -> Chunk:
        return super().build_chunk(position, layout, layers, {})


class IgnoresTheMask(Gpt):
    def build_chunk(
        self, position: int, layout: tuple[Place, ...], layers: ParallelLayers, shared: dict[str, nn.Parameter]
    ) -> Chunk:
        chunk = super().build_chunk(position, layout, layers, shared)
        forward = chunk.forward  # type: ignore[attr-defined]  # a Module has one

        def masked_by_nothing(x: torch.Tensor | None, microbatch: Microbatch) -> ChunkOut:
            mask = microbatch.fields["loss_mask"]
            fields = {**microbatch.fields, "loss_mask": torch.ones_like(mask)}
            out: ChunkOut = forward(x, replace(microbatch, fields=fields))
            return replace(out, losses={"lm": (out.losses["lm"][0], mask.sum())})

        chunk.forward = masked_by_nothing  # type: ignore[attr-defined]
        return chunk


class AlwaysDrops(Gpt):
    def build_chunk(
        self, position: int, layout: tuple[Place, ...], layers: ParallelLayers, shared: dict[str, nn.Parameter]
    ) -> Chunk:
        chunk = super().build_chunk(position, layout, layers, shared)
        chunk.train = lambda mode=True: chunk  # type: ignore[method-assign]
        return chunk


class CountsNothing(Gpt):
    def flops_per_token(self, sequence_length: int) -> float:
        return 0.0


WRONG = {
    WrongBoundary: ("tensors between chunks match boundary", "bfloat16"),
    WholeSequence: (
        "tensors between chunks match boundary under sequence parallelism",
        r"sequence_shards is 2, position 0 sends \(8, 2, 16\) torch.float64, boundary declares \(16, 2, 16\)",
    ),
    ForgetsMemory: (
        "tensors between chunks match boundary",
        r"position 0 sends \[\] beside x, boundary declares \['memory'\]",
    ),
    ForgetsTokens: ("it needs known fields only", "fields by position"),
    NumbersLayersByChunk: ("initial weights do not depend on the layout", "layers.2"),
    TiesNothing: ("chunks of one stage share tied parameters", "two copies of .*embedding.word.weight"),
    IgnoresTheMask: ("masked labels have no weight", "loss after changing masked labels"),
    AlwaysDrops: ("evaluation has no dropout", "second evaluation"),
    CountsNothing: ("flops do not shrink with the sequence", "flops_per_token is 0"),
}


def test_a_mixture_of_experts_conforms() -> None:
    options = GptOptions.model_validate(
        {
            **SMALL["model"],
            "experts": 4,
            "expert_layer_pattern": (0, 1),
            "expert_capacity_factor": 1.0,
            "shared_expert_ffn_size": 8,
            "z_loss_coeff": 0.1,
        }
    )
    assert not failures(model_checks(lambda context, _: Gpt(context, options), options))


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_suite_sees_a_wrong_model(wrong: type[Gpt]) -> None:
    name, message = WRONG[wrong]
    checks = model_checks(lambda context, _: wrong(context, OPTIONS), OPTIONS)
    assert re.search(message, failures(check for check in checks if check.name == name)[name])
