"""``parallel-layer=te`` on Transformer Engine itself: everything but its kernels, which need a GPU.

Its modules are built on the CPU and on the meta device, and the stand-in's signatures are compared with theirs, so that
what the other tests show of the stand-in holds for the library. Skipped where it is missing; ``make te`` brings it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from megatron_run.contracts import AttentionShape, Init, LinearPart, LinearSpec
from megatron_run_engine.nn.parallel import LayerSplit
from megatron_run_engine.runtime.comm import ParallelGroup
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_parallel_layer_te import EngineLayers, shapes
from megatron_run_parallel_layer_te.library import Engine, find_engine
from megatron_run_parallel_layer_te.precision import Options, Precision, QuantizedWeight, make_recipe
from megatron_run_testing.build_contexts import single_process_context
from tests.plugins.engine import recipes, stand_in
from tests.plugins.engine.cuda_on_tapes import pretend
from tests.plugins.engine.layers import STAND_IN
from tests.plugins.optional_library import skip_without

pytestmark = [pytest.mark.te, pytest.mark.filterwarnings("default")]  # the library has warnings of its own

MODULES = ("Linear", "LayerNormLinear", "LayerNorm", "RMSNorm", "DotProductAttention")
RECIPES = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling")
ALONE = LayerSplit(ParallelGroup())
INIT = Init("normal", 0.02)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The library as a run finds it, which believes that there is a GPU."""
    skip_without("transformer_engine")
    pretend(monkeypatch)
    return find_engine(torch.device("cuda", 0))


def layers(engine: Engine, context: BuildContext, **options: Any) -> EngineLayers:
    return EngineLayers(context, ALONE, engine, Options(**options))


def described(module: nn.Module) -> dict[str, Any]:
    """Name, shape and type of every parameter, in order."""
    return {name: (tuple(p.shape), p.dtype, p.device.type) for name, p in module.named_parameters()}


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_the_stand_in_takes_what_the_library_takes(engine: Engine, name: str, method: str) -> None:
    """An argument of the stand-in is one of the library's, with its default; so no call fits the stand-in alone."""
    mine, theirs = (parameters(getattr(getattr(library, name), method)) for library in (stand_in, engine.pytorch))
    open_ended = any(other.kind is other.VAR_KEYWORD for other in theirs.values())
    for each in mine.values():
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) or each.name == "self":
            continue
        if each.default is each.empty:
            assert each.name in theirs or [*mine].index(each.name) < len(theirs), each.name
        elif each.name in theirs:
            assert each.name == "device" or theirs[each.name].default == each.default, each.name
        else:
            assert open_ended, each.name


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_of_the_stand_in_are_the_librarys(engine: Engine, name: str) -> None:
    theirs = {each.name for each in dataclasses.fields(getattr(engine.recipe, name))}
    assert {each.name for each in dataclasses.fields(getattr(recipes, name))} <= theirs


@pytest.mark.parametrize("fp8", ["delayed", "current", "mxfp8", "block"])
@pytest.mark.parametrize("fp8_format", ["auto", "e4m3", "hybrid"])
def test_every_recipe_can_be_made(engine: Engine, fp8: Any, fp8_format: Any) -> None:
    options = Options(fp8=fp8, fp8_format=fp8_format, fp8_margin=1, fp8_amax_history=4, fp8_amax="most_recent")
    made = make_recipe(engine, options, ALONE)
    assert type(made).__name__ in RECIPES
    if fp8 == "delayed":
        assert (made.margin, made.amax_history_len, made.amax_compute_algo) == (1, 4, "most_recent")
        assert made.reduce_amax is False
    if fp8_format != "auto":
        assert made.fp8_format is engine.recipe.Format[fp8_format.upper()]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_every_layer_is_built_with_the_parameters_of_the_plan_and_of_the_stand_in(
    engine: Engine, device: str, kind: Any, fused: bool, delayed: bool, bias: bool
) -> None:
    options = {"fuse_weight_gradients": fused, "delay_weight_gradients": delayed}
    found = []
    for library in (engine, Engine(shapes, None, ""), STAND_IN):
        made = layers(library, single_process_context(dtype=torch.bfloat16, device=device), **options)
        parts = (LinearPart("query", 32), LinearPart("key", 16), LinearPart("value", 16))
        built = [
            made.column_linear(LinearSpec(32, parts, INIT, bias=bias), made.norm(kind, 32, 1e-3)),
            made.column_linear(LinearSpec(32, parts, INIT, bias=bias)),
            made.row_linear(LinearSpec(64, 32, INIT, bias=bias)),
            made.norm(kind, 32),
            made.core_attention(AttentionShape(4, 2, 8, layer=3), 0.1),
        ]
        found.append([described(each) for each in built])
    assert found[0] == found[1] == found[2]
    assert all(found[0][:4])


def test_every_call_fits(engine: Engine) -> None:
    library, x = engine.pytorch, object()
    for module in (library.Linear, library.LayerNormLinear):
        inspect.signature(module.forward).bind(module, x, is_first_microbatch=False)
        inspect.signature(module.backward_dw).bind(module)
    attend = inspect.signature(library.DotProductAttention.forward)
    attend.bind(library.DotProductAttention, x, x, x, attn_mask_type="causal")
    attend.bind(library.DotProductAttention, x, x, x, attention_mask=x, attn_mask_type="arbitrary")
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"), x)
    attend.bind(library.DotProductAttention, x, x, x, qkv_format="thd", attn_mask_type="padding_causal", **lengths)
    inspect.signature(library.autocast).bind(enabled=True, recipe=None, amax_reduction_group=None)
    for name in ("is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available"):
        inspect.signature(getattr(library, name)).bind(return_reason=True)


def test_a_region_of_a_length_that_fp8_cannot_take_is_entered_and_left(engine: Engine) -> None:
    precision = Precision(engine, Options(fp8="current"), ALONE, single_process_context().train)
    with precision.region(torch.empty(7, 1, 32)):
        assert not engine.pytorch.quantization.FP8GlobalStateManager.is_fp8_enabled()


def test_the_librarys_copies_of_a_weight_are_dropped_where_they_are_kept(engine: Engine) -> None:
    context = single_process_context(dtype=torch.bfloat16)
    layer: Any = layers(engine, context, fp8="current").row_linear(LinearSpec(32, 32, INIT, bias=False))
    kept = layer.module._fp8_workspaces
    quantized = QuantizedWeight(context.gradients, layer.module)
    context.gradients.start_step(2, lambda _: None)
    kept["weight"] = "of the step before"
    assert quantized.is_first_microbatch(training=True) is False
    assert kept == {}
    kept["weight"] = "of this step"
    assert quantized.is_first_microbatch(training=True) is False
    assert kept


def test_the_library_quantises_where_it_keeps_no_copy_and_uses_it_again(engine: Engine) -> None:
    """What ``is_first_microbatch=False`` means to it: it makes a copy where there is none, and only there."""
    from transformer_engine.pytorch.module.base import quantize_weight

    class Quantizer:
        made = 0

        def __getattr__(self, name: str) -> Any:
            return True if name.endswith("usage") else (lambda *_, **__: None)

        def __call__(self, tensor: Any, **_: Any) -> object:
            self.made += 1
            return object()

        quantize = __call__

    quantizer, weight = Quantizer(), torch.ones(2, 2)
    _, copy = quantize_weight(tensor=weight, quantizer=quantizer, update_workspace=False, cache=True)
    assert (quantizer.made, copy is not None) == (1, True)
    used, made = quantize_weight(tensor=weight, quantizer=quantizer, workspace=copy, update_workspace=False, cache=True)
    assert used is copy
    assert (quantizer.made, made) == (1, None)
