"""FP8: which recipe the options become, in which regions products run, and which sizes are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_run.config.request import Request
from megatron_run.contracts import Init, LinearPart, LinearSpec
from megatron_run.errors import InputError, PluginError, Problems
from megatron_run.planning import resolve
from megatron_run_engine.nn.parallel import LayerSplit
from megatron_run_engine.runtime.comm import ParallelGroup
from megatron_run_parallel_layer_te import EngineLayers
from megatron_run_parallel_layer_te.precision import Options, Precision, check_gpu, make_recipe
from megatron_run_testing.build_contexts import prepare, single_process_context
from tests.plugins.engine import recipes
from tests.plugins.engine.layers import STAND_IN, engine_layers
from tests.plugins.engine.stand_in import REGIONS

ALONE, PAIR = LayerSplit(ParallelGroup()), LayerSplit(ParallelGroup(0, 2), sequence=True)
INIT = Init("normal", 0.02)
HYBRID, E4M3 = recipes.Format.HYBRID, recipes.Format.E4M3


def precision(fp8: Any, split: LayerSplit = ALONE, **train: Any) -> Precision:
    return Precision(STAND_IN, Options(fp8=fp8), split, single_process_context(train=train).train)


def column(layers: EngineLayers, inputs: int = 32, outputs: int = 32) -> nn.Module:
    return layers.column_linear(LinearSpec(inputs, (LinearPart("up", outputs),), INIT, bias=True))


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({"fp8": "delayed"}, recipes.DelayedScaling(reduce_amax=False)),
        (
            {
                "fp8": "delayed",
                "fp8_margin": 2,
                "fp8_amax_history": 16,
                "fp8_amax": "most_recent",
                "fp8_format": "e4m3",
            },
            recipes.DelayedScaling(2, E4M3, 16, "most_recent", reduce_amax=False),
        ),
        ({"fp8": "current"}, recipes.Float8CurrentScaling(HYBRID)),
        ({"fp8": "current", "fp8_format": "e4m3"}, recipes.Float8CurrentScaling(E4M3)),
        ({"fp8": "mxfp8"}, recipes.MXFP8BlockScaling(fp8_format=E4M3)),
        ({"fp8": "block", "fp8_format": "hybrid"}, recipes.Float8BlockScaling(HYBRID)),
    ],
)
def test_the_options_become_a_recipe(options: dict[str, Any], recipe: object) -> None:
    assert make_recipe(STAND_IN, Options(**options), ALONE) == recipe


def test_delayed_scales_agree_over_tensor_parallel_ranks_and_never_over_the_world() -> None:
    group: Any = object()
    for peers, reduced in ((ParallelGroup(0, 2, group), True), (ParallelGroup(), False)):
        assert make_recipe(STAND_IN, Options(fp8="delayed"), LayerSplit(peers)).reduce_amax is reduced
    layers = EngineLayers(
        single_process_context(), LayerSplit(ParallelGroup(0, 2, group)), STAND_IN, Options(fp8="delayed")
    )
    with layers.forward_pass():
        assert REGIONS.groups[-1] is group


def test_without_fp8_there_is_no_region() -> None:
    layer: Any = column(engine_layers(single_process_context()))
    layer(torch.ones(16, 2, 32, dtype=torch.float64))
    assert layer.module.ran_in == [None]


def test_products_run_in_the_recipe_and_generation_of_odd_lengths_does_not() -> None:
    layer: Any = column(engine_layers(single_process_context(), fp8="current"))
    with torch.no_grad():
        layer(torch.ones(16, 2, 32, dtype=torch.float64))
        layer(torch.ones(7, 1, 32, dtype=torch.float64))
    assert layer.module.ran_in == [recipes.Float8CurrentScaling(HYBRID), None]
    assert REGIONS.open == []


def test_delayed_scales_are_renewed_once_after_a_whole_forward() -> None:
    context = single_process_context()
    layers = engine_layers(context, fp8="delayed")
    first, second = column(layers), column(layers)
    prepare(context, [Two(first, second)])
    before = REGIONS.renewed
    with layers.forward_pass():
        second(first(torch.ones(16, 2, 32, dtype=torch.float64)))
        assert REGIONS.renewed == before
    assert REGIONS.renewed == before + 1


def test_a_weight_is_quantised_once_a_step_and_anew_once_it_has_changed() -> None:
    context = single_process_context()
    layer: Any = column(engine_layers(context, fp8="current"))
    prepare(context, [Two(layer)])
    x = torch.linspace(-1, 1, 16 * 2 * 32, dtype=torch.float64).view(16, 2, 32)
    for step in (1, 2, 3):
        context.gradients.start_step(3, lambda _: None)
        for _ in range(3):
            y = layer(x)
            y.sum().backward()
        assert layer.module.quantised == step
        torch.testing.assert_close(y, torch.nn.functional.linear(x, layer.weight, layer.bias))
        with torch.no_grad():
            layer.weight.mul_(-0.5)


def test_an_evaluation_between_steps_sees_the_weights_of_now() -> None:
    context = single_process_context()
    layer: Any = column(engine_layers(context, fp8="current"))
    prepare(context, [Two(layer)])
    x = torch.ones(16, 2, 32, dtype=torch.float64)
    context.gradients.start_step(1, lambda _: None)
    layer(x).sum().backward()
    with torch.no_grad():
        layer.weight.mul_(-0.5)
        layer.eval()
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_a_graph_quantises_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that a later step drops is no address for a graph to read from."""
    context = single_process_context()
    layer: Any = column(engine_layers(context, fp8="current"))
    prepare(context, [Two(layer)])
    context.gradients.start_step(2, lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        layer(torch.ones(16, 2, 32, dtype=torch.float64)).sum().backward()
    assert layer.module.quantised == 2
    assert layer.module._fp8_workspaces == {}


@pytest.mark.parametrize("capture", ["partial", "te"])
def test_delayed_scales_and_graphs_of_parts_of_a_forward_are_refused_together(capture: str) -> None:
    def chosen(*plugins: str) -> Request:
        return Request(configs=("preset:tiny",), plugins=plugins)

    with pytest.raises(Problems) as refused:
        resolve(chosen("parallel-layer=te,fp8=delayed", f"graph-capture={capture}"))
    assert str(refused.value) == (
        f"parallel-layer.fp8=delayed does not go with graph-capture={capture}: scales are renewed once after a whole "
        "forward, and each graph of a part of it would renew them again (from --plugin parallel-layer=te,fp8=delayed); "
        "set parallel-layer.fp8=current, or choose --plugin graph-capture=none"
    )
    resolve(chosen("parallel-layer=te,fp8=delayed"))
    resolve(chosen("parallel-layer=te,fp8=current", f"graph-capture={capture}"))


class Two(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any, microbatch: object) -> Any:
        raise AssertionError("its layers are called one by one")

    def segments(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("fp8", "size", "message"),
    [
        ("delayed", 40, "do not fit parallel-layer.fp8=delayed: matrix sizes must be multiples of 16: 40 / 16 = 2.5; "),
        ("mxfp8", 48, "must be multiples of 32: 48 / 32 = 1.5; make them 32 or 64"),
        ("block", 192, "must be multiples of 128: 192 / 128 = 1.5; make them 128 or 256"),
    ],
)
def test_a_side_of_a_matrix_that_fp8_cannot_take_is_refused_with_the_arithmetic(
    fp8: str, size: int, message: str
) -> None:
    layers = engine_layers(single_process_context(train={"sequence_length": 64}), fp8=fp8)
    with pytest.raises(InputError) as refusal:
        column(layers, inputs=size, outputs=128)
    assert message in str(refusal.value)
    with pytest.raises(InputError, match=f"{size} output features of a rank do not fit"):
        column(layers, 128, size)
    with pytest.raises(InputError, match=f"{size} input features of a rank do not fit"):
        layers.row_linear(LinearSpec(size, 128, INIT, bias=False))


def test_tokens_that_fp8_cannot_take_are_refused_with_the_arithmetic() -> None:
    precision("current", sequence_length=24)
    with pytest.raises(InputError) as refusal:
        precision("current", PAIR, sequence_length=24)
    assert str(refusal.value) == (
        "train.micro_batch_size=2 x train.sequence_length=24 = 48 tokens do not fit parallel-layer.fp8=current: matrix "
        "sizes must be multiples of 16: 24 / 16 = 1.5 on each of 2 tensor-parallel ranks; make their product 32 or 64, "
        "or set parallel-layer.fp8=none"
    )


def test_delayed_scaling_refuses_recomputation() -> None:
    precision("current", recompute="full")
    with pytest.raises(InputError, match=r"fp8=delayed does not go with train\.recompute=full"):
        precision("delayed", recompute="full")


def test_a_gpu_that_cannot_compute_it_is_named_with_the_librarys_reason() -> None:
    check_gpu(STAND_IN, Options(fp8="delayed"))
    with pytest.raises(PluginError) as refusal:
        check_gpu(STAND_IN, Options(fp8="mxfp8"))
    assert str(refusal.value) == (
        "this GPU cannot compute with parallel-layer.fp8=mxfp8: Device compute capability 10.0 or higher required for "
        "MXFP8 execution.; choose another fp8, or set parallel-layer.fp8=none"
    )
