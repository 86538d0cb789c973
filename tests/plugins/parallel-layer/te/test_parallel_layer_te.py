"""Layers of Transformer Engine on one rank, through the stand-in: results, names, arguments, weight gradients."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_run.contracts import AttentionShape, ChunkOut, Init, LinearPart, LinearSpec, ParallelLayers, Segment
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.nn import LayerNorm
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_parallel_layer_te.layers import after_backward
from megatron_run_testing.build_contexts import logical_gradients, logical_values, prepare, single_process_context
from megatron_run_testing.parallel_layer import parallel_layer_checks
from tests.contracts.conformance import failures
from tests.plugins.engine import stand_in as engine_stand_in
from tests.plugins.engine.layers import delayed_layers, engine_layers

INIT = Init("normal", 0.5)
QKV = (LinearPart("query", 8), LinearPart("key", 4), LinearPart("value", 4))
#: Who computes weight gradients, and when.
WAYS: Mapping[str, Mapping[str, bool]] = {
    f"fused {fused}, delayed {delayed}": {"fuse_weight_gradients": fused, "delay_weight_gradients": delayed}
    for fused, delayed in product((True, False), repeat=2)
}


class Layer(nn.Module):
    """A chunk of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor | None, microbatch: object) -> ChunkOut:
        return ChunkOut(self.layer(x))

    def segments(self) -> tuple[Segment, ...]:
        return ()


def qkv(layers: ParallelLayers, kind: Any = "layernorm", *, bias: bool = True) -> nn.Module:
    return layers.column_linear(LinearSpec(8, QKV, INIT, bias=bias), layers.norm(kind, 8, 1e-3))


def trained(context: BuildContext, layer: nn.Module) -> dict[str, Tensor]:
    """Values and gradients of every logical tensor after two microbatches, and the output's."""
    infos = prepare(context, [Layer(layer)])
    x = torch.linspace(-1, 1, 6 * 2 * 8, dtype=torch.float64).view(6, 2, 8).sin().requires_grad_()
    y = layer(x)
    for _ in range(2):
        (layer(x) * torch.linspace(1, 2, y.shape[-1], dtype=torch.float64)).sum().backward()
    assert x.grad is not None
    gradients = {f"gradient of {name}": value for name, value in logical_gradients(infos).items()}
    return {"y": y.detach(), "dx": x.grad, **logical_values(infos), **gradients}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_layers_conform(way: Mapping[str, bool]) -> None:
    assert failures(parallel_layer_checks(lambda context: engine_layers(context, **way))) == {}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("make", "ranks"),
    [
        (engine_layers, (2,)),
        *(pytest.param(make, (4,), marks=pytest.mark.nightly) for make in (engine_layers, delayed_layers)),
        pytest.param(delayed_layers, (2,), marks=pytest.mark.nightly),
    ],
)
def test_the_layers_conform_split_over_two_and_four_ranks(make: Any, ranks: tuple[int, ...]) -> None:
    assert failures(parallel_layer_checks(make, ranks=ranks)) == {}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_fused_into_a_product_is_the_dense_norm_before_it(
    kind: str, bias: bool, way: Mapping[str, bool]
) -> None:
    found, expected = (
        trained(context, qkv(make(context), kind, bias=bias))
        for context, make in (
            (single_process_context(), lambda context: engine_layers(context, **way)),
            (single_process_context(), DenseLayers),
        )
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_names_and_their_order_are_those_of_the_dense_layer() -> None:
    described = []
    for make in (engine_layers, DenseLayers):
        context = single_process_context()
        described.append(prepare(context, [Layer(qkv(make(context)))]))
    found, expected = (list(infos.values()) for infos in described)
    assert found == expected
    assert [part.name for info in found for part in info.parts] == [
        *(f"layer.{name}.weight" for name in ("query", "key", "value")),
        *(f"layer.{name}.bias" for name in ("query", "key", "value")),
        "layer.norm.weight",
        "layer.norm.bias",
    ]


def test_a_norm_of_this_factory_becomes_part_of_the_product() -> None:
    context = single_process_context()
    layer: Any = qkv(engine_layers(context), "rmsnorm")
    assert isinstance(layer.module, engine_stand_in.LayerNormLinear)
    assert layer.module.options["normalization"] == "RMSNorm"
    assert layer.module.options["eps"] == 1e-3
    assert layer.norm.weight is layer.module.layer_norm_weight
    assert len(list(layer.parameters())) == 3


def test_a_norm_of_somebody_else_is_applied_before_the_product() -> None:
    found, expected = (
        trained(context, make(context).column_linear(LinearSpec(8, QKV, INIT, bias=True), LayerNorm(context, 8, 1e-3)))
        for context, make in ((single_process_context(), engine_layers), (single_process_context(), DenseLayers))
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
    context = single_process_context()
    layer: Any = engine_layers(context).column_linear(LinearSpec(8, QKV, INIT, bias=True), LayerNorm(context, 8, 1e-3))
    assert isinstance(layer.module, engine_stand_in.Linear)


def test_what_a_column_linear_asks_of_the_library() -> None:
    layers = engine_layers(single_process_context(dtype=torch.bfloat16))
    layer: Any = layers.column_linear(LinearSpec(8, QKV, INIT, bias=True))
    assert (layer.module.weight.shape, layer.module.weight.dtype) == ((16, 8), torch.bfloat16)
    asked = {name: value for name, value in layer.module.options.items() if name != "init_method"}
    assert asked == {
        **defaults(engine_stand_in.Linear),
        "bias": True,
        "parallel_mode": "column",
        "params_dtype": torch.bfloat16,
        "device": "cpu",
        "fuse_wgrad_accumulation": True,
    }


def test_what_a_row_linear_asks_of_the_library_and_that_its_bias_is_added_outside() -> None:
    options = {"fuse_weight_gradients": False, "delay_weight_gradients": True}
    layer: Any = engine_layers(single_process_context(), **options).row_linear(LinearSpec(8, 4, INIT, bias=True))
    asked = {name: value for name, value in layer.module.options.items() if name != "init_method"}
    assert asked == {
        **defaults(engine_stand_in.Linear),
        "bias": False,
        "parallel_mode": "row",
        "params_dtype": torch.float64,
        "device": "cpu",
        "delay_wgrad_compute": True,
    }
    assert layer.bias.shape == (4,)


def test_what_attention_asks_of_the_library() -> None:
    layer: Any = engine_layers(single_process_context()).core_attention(AttentionShape(4, 2, 8, layer=6), 0.25)
    assert layer.module.options == {
        **defaults(engine_stand_in.DotProductAttention),
        "num_attention_heads": 4,
        "kv_channels": 8,
        "num_gqa_groups": 2,
        "attention_dropout": 0.25,
        "layer_number": 7,
    }


def defaults(module: type[nn.Module]) -> dict[str, Any]:
    """The defaults of the constructor: what is asked for without a word."""
    parameters = inspect.signature(module).parameters.values()
    options = {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
    options.pop("init_method", None)
    return options


def test_the_stand_in_refuses_an_argument_that_the_library_does_not_have() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'gather_output'"):
        engine_stand_in.Linear(8, 8, device="cpu", gather_output=True)  # type: ignore[call-arg]  # on purpose


@pytest.mark.parametrize(
    "name", ["bidirectional", "padding", "causal with padding", "two dimensions", "nothing to see"]
)
def test_masks_mean_the_same_as_to_the_dense_core(name: str) -> None:
    length, padding = 6, torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = {
        "bidirectional": torch.ones(1, 1, 1, 1, dtype=torch.bool),
        "padding": padding[:, None, None],
        "causal with padding": padding[:, None, None] & causal,
        "two dimensions": causal,
        "nothing to see": padding[:, None, :, None] & causal,
    }[name]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(length, 2, n, 8, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    found, expected = (
        make(single_process_context()).core_attention(AttentionShape(4, 2, 8, 0), 0.0)(query, key, value, mask)
        for make in (engine_layers, DenseLayers)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_packed_documents_mean_the_same_as_to_the_dense_core() -> None:
    documents = torch.tensor([[0, 2, 3, 6, 6], [0, 6, 6, 6, 6]])
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(6, 2, n, 8, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    found, expected = (
        make(single_process_context()).core_attention(AttentionShape(4, 2, 8, 0), 0.0)(
            query, key, value, None, documents
        )
        for make in (engine_layers, DenseLayers)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_evaluation_drops_no_attention() -> None:
    attention = engine_layers(single_process_context()).core_attention(AttentionShape(2, 2, 4, 0), 0.9)
    query = torch.randn(6, 2, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    attention.eval()
    assert torch.equal(attention(query, query, query, None), attention(query, query, query, None))
    attention.train()
    assert not torch.equal(attention(query, query, query, None), attention(query, query, query, None))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_weight_gradient_arrives_once_a_microbatch(way: Mapping[str, bool]) -> None:
    context = single_process_context()
    layer = qkv(engine_layers(context, **way))
    infos = prepare(context, [Layer(layer)])
    x, ready = torch.ones(6, 2, 8, dtype=torch.float64, requires_grad=True), []
    for microbatches in (2, 3):
        context.gradients.start_step(microbatches, lambda parameter: ready.append(infos[parameter].name))
        for _ in range(microbatches):
            assert ready == []
            layer(x).sum().backward()
    assert sorted(ready) == sorted(info.name for info in infos.values())
    assert all(parameter.grad is None for parameter in infos)


def test_a_fused_gradient_is_no_dummy() -> None:
    """The library returns uninitialised memory for a weight that has this attribute, so none of ours may have it."""
    context = single_process_context()
    layer = qkv(engine_layers(context))
    infos = prepare(context, [Layer(layer)])
    layer(torch.ones(6, 2, 8, dtype=torch.float64)).sum().backward()
    assert not any(hasattr(parameter, "grad_added_to_main_grad") for parameter in infos)
    assert all(main_grad(parameter).isfinite().all() for parameter in infos)


def test_a_delayed_weight_gradient_waits_for_w() -> None:
    context = single_process_context()
    layer: Any = qkv(engine_layers(context, delay_weight_gradients=True))
    prepare(context, [Layer(layer)])
    x = torch.arange(96, dtype=torch.float64).view(6, 2, 8).sin()
    with context.gradients.deferring((0, 0)):
        layer(x).sin().sum().backward()
    assert not main_grad(layer.weight).any()
    assert main_grad(layer.bias).any()  # what is cheap is finished in I
    context.gradients.run_deferred((0, 0))
    assert main_grad(layer.weight).any()


def test_without_a_graph_nothing_is_handed_over() -> None:
    context = single_process_context()
    layer = qkv(engine_layers(context))
    prepare(context, [Layer(layer)])
    with torch.no_grad():
        assert not layer(torch.ones(6, 2, 8, dtype=torch.float64)).requires_grad


def test_what_follows_a_backward_is_called_after_it_even_when_the_input_needs_no_gradient() -> None:
    order: list[str] = []
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda _: order.append("weight"))
    (after_backward(torch.ones(2), lambda: order.append("after")) * weight).sum().backward()
    assert order == ["weight", "after"]
