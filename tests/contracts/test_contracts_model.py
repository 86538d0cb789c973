"""Every installed model conforms, and the suite sees what a wrong one does."""

from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

import pluggy
import pytest
import torch
from pydantic import BaseModel
from torch import nn

from megatron_run import hookspecs
from megatron_run.actions import Place
from megatron_run.builtin.model.gpt import Gpt, GptOptions
from megatron_run.contracts import (
    Boundary,
    BuildContext,
    Chunk,
    ChunkOut,
    Microbatch,
    Model,
    ParallelLayers,
    entry_point_group,
)
from megatron_run.testing.check import Check, CheckFailed
from megatron_run.testing.model import model_checks

INSTALLED = sorted(entry_points(group=entry_point_group("model")), key=lambda entry: entry.name)
DEFAULTS: dict[str, dict[str, object]] = {"defaults": {}}
SMALL = {"num_layers": 4, "hidden_size": 16, "num_heads": 4, "vocab_size": 61}
#: Options that make other networks of one plugin, tried besides its defaults.
VARIANTS: dict[str, dict[str, dict[str, object]]] = {
    "gpt": {
        "llama": {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2, "bias": False},
        "untied, three layers": {"tie_embeddings": False, "num_layers": 3},
    }
}


def checks_of(entry: EntryPoint, variant: dict[str, object]) -> tuple[Check, ...]:
    """The suite on a small network of the plugin."""
    hooks = pluggy.PluginManager("megatron_run")
    hooks.add_hookspecs(hookspecs)
    hooks.register(entry.load(), name=f"model={entry.name}")
    info = hooks.hook.megatron_run_plugin_info()
    assert (info.kind, info.name) == ("model", entry.name)

    def create(context: BuildContext, options: BaseModel) -> Model:
        model = hooks.hook.megatron_run_create_model(context=context, options=options)
        assert isinstance(model, Model)
        return model

    return model_checks(create, info.options.model_validate({**SMALL, **variant}))


CASES = [
    pytest.param(check, id=f"{entry.name}, {name}: {check.name}")
    for entry in INSTALLED
    for name, variant in (DEFAULTS | VARIANTS.get(entry.name, {})).items()
    for check in checks_of(entry, variant)
]


@pytest.mark.parametrize("check", CASES)
def test_an_installed_model_conforms(check: Check) -> None:
    check.run()


def test_the_built_in_model_is_installed() -> None:
    assert "gpt" in {entry.name for entry in INSTALLED}


class WrongBoundary(Gpt):
    def boundary(self, microbatch: Microbatch, micro_batch_size: int, sequence_length: int) -> Boundary:
        right = super().boundary(microbatch, micro_batch_size, sequence_length)
        return replace(right, dtype=torch.bfloat16)


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
    WrongBoundary: ("what crosses is what boundary says", "bfloat16"),
    ForgetsTokens: ("it asks for known fields", "fields by position"),
    NumbersLayersByChunk: ("initial weights do not depend on the layout", "layers.2"),
    TiesNothing: ("chunks of one stage share tied parameters", "two copies of .*embedding.word.weight"),
    IgnoresTheMask: ("masked labels weigh nothing", "loss after changing masked labels"),
    AlwaysDrops: ("evaluation has no dropout", "second evaluation"),
    CountsNothing: ("flops do not shrink with the sequence", "flops_per_token is 0"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_the_suite_sees_a_wrong_model(wrong: type[Gpt]) -> None:
    name, message = WRONG[wrong]
    options = GptOptions.model_validate(SMALL)
    checks = {check.name: check for check in model_checks(lambda context, _: wrong(context, options), options)}
    with pytest.raises(CheckFailed, match=message):
        checks[name].run()
