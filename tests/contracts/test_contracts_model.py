"""The suite of kind model sees what a wrong one does."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_run.config.values import nested
from megatron_run.contracts import Boundary, Chunk, ChunkOut, Microbatch, ParallelLayers
from megatron_run.contracts.costs import LayerCosts, ModelCosts, SegmentCosts
from megatron_run.contracts.schedule import Place
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_testing import CheckFailed
from megatron_run_testing.model import model_checks
from tests.contracts.conformance import SMALL, failures

OPTIONS = GptOptions.model_validate(nested(SMALL["model"]))


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


class ChangesTheLoss(Gpt):
    """A model whose loss is what ``change`` makes of it."""

    @staticmethod
    def change(total: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
        raise NotImplementedError

    def build_chunk(
        self, position: int, layout: tuple[Place, ...], layers: ParallelLayers, shared: dict[str, nn.Parameter]
    ) -> Chunk:
        chunk = super().build_chunk(position, layout, layers, shared)
        forward = chunk.forward  # type: ignore[attr-defined]  # a Module has one

        def changed(x: torch.Tensor | None, microbatch: Microbatch) -> ChunkOut:
            out: ChunkOut = forward(x, microbatch)
            losses = {name: (self.change(total, microbatch), weight) for name, (total, weight) in out.losses.items()}
            return replace(out, losses=losses)

        chunk.forward = changed  # type: ignore[attr-defined]
        return chunk


class AveragesInTraining(ChangesTheLoss):
    """Divides by the tokens itself, where the engine divides too; what it reports in evaluation is right."""

    @staticmethod
    def change(total: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
        return total / 7 if microbatch.train else total


class DrawsItself(ChangesTheLoss):
    """Has something random in training that is no dropout of the layers."""

    @staticmethod
    def change(total: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
        return total * (1 + microbatch.step % 3) if microbatch.train else total


class RoundsTheLoss(ChangesTheLoss):
    @staticmethod
    def change(total: torch.Tensor, microbatch: Microbatch) -> torch.Tensor:
        return total.bfloat16().double()


class DetachesActivations(Gpt):
    """The gradient of a matrix ends at its output: all cuts, ranks and recomputations agree on what is left."""

    def build_chunk(
        self, position: int, layout: tuple[Place, ...], layers: ParallelLayers, shared: dict[str, nn.Parameter]
    ) -> Chunk:
        chunk = super().build_chunk(position, layout, layers, shared)
        for name, module in chunk.named_modules():
            if name.endswith("2.mlp.input"):
                module.register_forward_hook(lambda _module, _inputs, y: y.detach())
        return chunk


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
    AveragesInTraining: (
        "training without dropout has the loss of evaluation",
        r"the loss is 14\.\d+ in training, 9\d\.\d+ in evaluation",
    ),
    DetachesActivations: (
        "gradients are those of the loss",
        r"along layers\.2\.mlp\.input\.norm\.bias the loss changes by .*, and by its gradient 0: is a tensor detached",
    ),
}


def test_a_mixture_of_experts_conforms() -> None:
    options = GptOptions.model_validate(
        nested(
            {
                **SMALL["model"],
                "experts.count": 4,
                "experts.layer_pattern": (0, 1),
                "experts.capacity_factor": 4.0,  # room for all: only trainings drop tokens
                "experts.shared.ffn_size": 8,
                "experts.z_loss_coeff": 0.1,
            }
        )
    )
    assert not failures(model_checks(lambda context, _: Gpt(context, options), options))


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_suite_sees_a_wrong_model(wrong: type[Gpt]) -> None:
    name, message = WRONG[wrong]
    checks = model_checks(lambda context, _: wrong(context, OPTIONS), OPTIONS)
    assert re.search(message, failures(check for check in checks if check.name == name)[name])


@pytest.mark.parametrize(
    ("model", "name", "untried"),
    [
        (RoundsTheLoss, "gradients are those of the loss", "its loss is too rough for finite differences"),
        (DrawsItself, "gradients are those of the loss", ""),
        (DrawsItself, "training without dropout has the loss of evaluation", "it draws random numbers in training"),
    ],
)
def test_what_no_difference_can_measure_is_not_called_wrong(model: type[Gpt], name: str, untried: str) -> None:
    (check,) = (
        check for check in model_checks(lambda context, _: model(context, OPTIONS), OPTIONS) if check.name == name
    )
    found = check.run() or ""
    assert found.startswith(untried)
    assert bool(found) == bool(untried)


def test_smoothed_labels_and_dropout_are_no_difference_between_training_and_evaluation() -> None:
    options = GptOptions.model_validate(nested({**SMALL["model"], "dropout": 0.5, "label_smoothing": 0.5}))
    checks = model_checks(Gpt, options)  # type: ignore[arg-type]  # it takes its own options
    assert not failures(check for check in checks if "loss" in check.name)


class CostlessOptions(GptOptions):
    """Its costs are those of a narrower model."""

    def costs(self, sequence_length: int, vocab_size: int) -> ModelCosts:
        narrow = GptOptions.model_validate({**self.model_dump(), "hidden_size": self.hidden_size // 2})
        return narrow.costs(sequence_length, vocab_size)


class OtherwiseKept(GptOptions):
    """Its costs have the weights of its layers, and ``factor`` times their saved values."""

    factor: float = 1.0

    def costs(self, sequence_length: int, vocab_size: int) -> ModelCosts:
        found = super().costs(sequence_length, vocab_size)
        return replace(found, layers=tuple(map(self._layer, found.layers)))

    def _layer(self, layer: LayerCosts) -> LayerCosts:
        products = ((layer.hidden, round(layer.weights / layer.hidden)),)
        kept = self.factor * layer.saved / layer.tokens - 2 * layer.hidden
        return replace(layer, parts=(SegmentCosts("all", products, kept),))


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (2.0, False), (0.5, False), (1 / 3, False)])
def test_saved_values_of_other_layers_are_refused(factor: float, right: bool) -> None:
    options = OtherwiseKept.model_validate({**SMALL["model"], "factor": factor})
    (check,) = (each for each in model_checks(Gpt, options) if each.name == "a layer saves what its costs tell")  # type: ignore[arg-type]  # it takes its own options
    with (
        nullcontext() if right else pytest.raises(CheckFailed, match=r"costs tell [\d,]+ saved values of layer 1 in 2")
    ):
        assert not check.run()


def test_costs_of_other_layers_are_refused() -> None:
    options = CostlessOptions.model_validate(SMALL["model"])
    (check,) = (each for each in model_checks(Gpt, options) if each.name == "costs are those of the layers")  # type: ignore[arg-type]  # it takes its own options
    with pytest.raises(CheckFailed, match=r"costs tell [\d,]+ weights, and the matrices built have [\d,]+"):
        check.run()


class Miscounted(GptOptions):
    """One value too many."""

    def costs(self, sequence_length: int, vocab_size: int) -> ModelCosts:
        found = super().costs(sequence_length, vocab_size)
        return replace(found, vectors=found.vectors + 1)


class OfWholeSamples(Gpt):
    """A model that does not say of itself that it computes pieces, as the costs of its options do."""


def test_costs_split_samples_where_the_model_says_so_itself() -> None:
    options = GptOptions.model_validate(SMALL["model"])
    for model, right in ((Gpt, True), (OfWholeSamples, False)):
        (check,) = (each for each in model_checks(model, options) if each.name == "costs are those of the layers")  # type: ignore[arg-type]  # it takes its own options
        words = "costs tell computes_pieces=True, and OfWholeSamples itself says False"
        with nullcontext() if right else pytest.raises(CheckFailed, match=words):
            assert not check.run()


def test_a_count_of_biases_and_norms_that_is_told_must_be_right() -> None:
    options = Miscounted.model_validate(SMALL["model"])
    (check,) = (each for each in model_checks(Gpt, options) if each.name == "costs are those of the layers")  # type: ignore[arg-type]  # it takes its own options
    with pytest.raises(CheckFailed, match=r"costs tell [\d,]+ parameters, and those built are [\d,]+"):
        check.run()
