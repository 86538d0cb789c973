"""Products in FP8: rounded to the nearest values, summed as PyTorch sums them, on every split, with every capture."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_run import load
from megatron_run.config.request import Request
from megatron_run.contracts import Init, LinearPart, LinearSpec
from megatron_run.errors import RunError
from megatron_run.planning import load_config, resolve
from megatron_run_engine import train
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.estimate.model_size import model_size
from megatron_run_engine.nn.fused import availability
from megatron_run_parallel_layer_fp8 import Fp8Layers, check_device, cublas
from megatron_run_parallel_layer_fp8.cast import cast, cast_both, scale_of
from megatron_run_parallel_layer_fp8.products import Fp8Products, Options
from megatron_run_parallel_layer_fp8.quantized import Quantized, Scaling, product, quantize
from megatron_run_testing.build_contexts import single_process_context
from tests.support.training import Seen, train_many

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def representable(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of an 8-bit type, in order, from its bits."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    known: torch.Tensor = values[values.isfinite()].unique()
    return known


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_values_are_the_nearest_ones_of_the_format(dtype: torch.dtype, scaling: Scaling) -> None:
    matrix = torch.randn(24, 40) * torch.logspace(-4, 4, 24)[:, None]
    found = quantize(matrix, dtype, scaling)
    assert found.values.dtype is dtype
    assert found.scale.shape == ((1, 1) if scaling == "tensorwise" else (24, 1))
    scaled, known = matrix.double() / found.scale.double(), representable(dtype)
    nearest = (scaled[..., None] - known).abs().amin(-1)
    off = (scaled - found.values.double()).abs()
    assert (off <= nearest * (1 + 1e-6)).all()
    assert found.values.double().abs().amax() == torch.finfo(dtype).max
    row = found.values.double().abs().amax(1)
    assert bool((row == torch.finfo(dtype).max).all()) is (scaling == "rowwise")


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_zeros_stay_zeros_and_what_is_not_finite_is_found(scaling: Scaling) -> None:
    zeros = quantize(torch.zeros(16, 16), E4M3, scaling)
    assert torch.equal(zeros.widened(), torch.zeros(16, 16))
    assert quantize(torch.full((16, 16), 1e-42), E4M3, scaling).widened().amax() < 1e-40
    for bad in (torch.inf, -torch.inf, torch.nan):
        matrix = torch.ones(16, 16)
        matrix[3, 5] = bad
        assert quantize(matrix, E4M3, scaling).widened()[3].isnan().all()


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("left", [E4M3, E5M2])
def test_a_product_is_that_of_pytorch(scaling: Scaling, left: torch.dtype) -> None:
    a = quantize(torch.randn(48, 64, dtype=torch.bfloat16), left, scaling)
    b = quantize(torch.randn(32, 64, dtype=torch.bfloat16).t().contiguous().t(), E4M3, scaling)
    bias = torch.randn(32, dtype=torch.bfloat16)
    for added in (None, bias):
        expected = torch._scaled_mm(
            a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), bias=added, out_dtype=torch.bfloat16
        )
        found = product(a, b, torch.bfloat16, added, fast=True)
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)  # one rounding to bf16


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_the_three_products_are_those_of_the_rounded_operands(scaling: Scaling) -> None:
    """Against float64: what is multiplied is rounded to FP8, and nothing else but the results is rounded."""
    products = Fp8Products(Options(scaling=scaling))
    x, grad = torch.randn(4, 8, 48), torch.randn(4, 8, 64)
    weight, bias, total = torch.randn(64, 48), torch.randn(64), torch.randn(64, 48)

    def rounded(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return quantize(matrix, dtype, scaling).widened().double()

    x2, grad2 = x.flatten(0, 1), grad.flatten(0, 1)
    forward = rounded(x2, E4M3) @ rounded(weight, E4M3).t() + bias.double()
    back = rounded(grad2, E5M2) @ rounded(weight.t(), E4M3).t()
    late = total.double() + (
        rounded(grad2.t(), E5M2) @ rounded(x2.t(), E4M3).t()
        if scaling == "tensorwise"
        else grad2.t().double() @ x2.double()
    )
    (y, kept), (gx, arrived) = products.forward_keeping(x, weight, bias), products.input_gradient_keeping(grad, weight)
    products.add_weight_gradient(total, arrived, kept)
    assert (y.shape, gx.shape) == ((4, 8, 64), (4, 8, 48))
    assert torch.equal(products.forward(x, weight, bias), y)
    assert torch.equal(products.input_gradient(grad, weight), gx)
    alone = (*products.keep_input(x), *products.keep_gradient(grad))
    assert all(torch.equal(one, other) for one, other in zip((*kept, *arrived), alone, strict=True))
    assert kept[0].itemsize == (1 if scaling == "tensorwise" else 4), "x would wait for the backward unrounded"
    for found, expected in ((y.flatten(0, 1), forward), (gx.flatten(0, 1), back), (total, late)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    exact = x2.double() @ weight.double().t() + bias.double()
    assert 0.005 < float((forward - exact).norm() / exact.norm()) < 0.06


def test_tokens_that_fp8_cannot_sum_over_keep_their_type() -> None:
    """As text generation, or the last pass of an evaluation, has them."""
    products, x, grad = Fp8Products(Options()), torch.randn(5, 16), torch.randn(5, 32)
    total = torch.zeros(32, 16)
    (_, kept), (_, arrived) = (
        products.forward_keeping(x, torch.randn(32, 16), None),
        products.input_gradient_keeping(grad, torch.randn(32, 16)),
    )
    products.add_weight_gradient(total, arrived, kept)
    torch.testing.assert_close(total, grad.t() @ x)


SETS = (
    "model.num_layers=2",
    "train.steps=4",
    "train.precision=bf16",
    "train.lr_shape=constant",
    "train.sequence_length=16",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "eval.interval=0",
    "model.dropout=0.1",
)
DENSE, SPLIT = "parallel-layer=dense+fp8", "parallel-layer=tensor+fp8"
STAGES = ("parallel.pipeline=2",)
#: Name -> (plugins, settings).
ALONE: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bf16": ((), ()),
    "fp8": ((DENSE,), ()),
    "rowwise": ((f"{DENSE},scaling=rowwise",), ()),
    "e4m3": ((f"{DENSE},gradients=e4m3",), ()),
    "recomputed": ((DENSE,), ("train.recompute=full",)),
    "recorded": ((DENSE, "graph-capture=partial,scope=attn,mlp"), ()),
    "compiled": ((DENSE, "graph-capture=compile,scope=attn,mlp,backend=aot_eager"), ()),
}
TWO: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "stages": ((DENSE, "schedule=1f1b"), STAGES),
    "split backward": ((DENSE, "schedule=zero-bubble"), STAGES),
    "tensor": ((SPLIT,), ("parallel.tensor=2",)),
    "sequence": ((SPLIT,), ("parallel.tensor=2", "parallel.sequence=true")),
    "sequence, rowwise": ((f"{SPLIT},scaling=rowwise",), ("parallel.tensor=2", "parallel.sequence=true")),
    "shards": ((DENSE, "optimizer=zero1"), ("parallel.data=2",)),
}


#: What others combine, or graphs and other optimizers show of their own.
RARE = {"compiled", "stages", "tensor", "sequence", "shards"}


@cache
def _trained(ranks: int, rare: bool) -> dict[str, Seen]:
    runs = {name: run for name, run in (ALONE if ranks == 1 else TWO).items() if (name in RARE) is rare}
    requests = [
        Request(("preset:tiny",), sets=(*SETS, *sets), plugins=plugins, nproc=ranks) for plugins, sets in runs.values()
    ]
    return {name: seen[0] for name, seen in zip(runs, train_many(ranks, requests), strict=True)}


def learned(name: str) -> list[float]:
    """The losses of a run, as its first rank saw them."""
    return _trained(1 if name in ALONE else 2, name in RARE)[name].losses


def each_of(*names: str) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.nightly] * (name in RARE)) for name in names]


@pytest.mark.multiproc
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", each_of("recomputed", "recorded", "stages", "split backward"))
def test_where_each_product_is_the_same_the_losses_have_the_same_bits(name: str) -> None:
    assert learned(name) == learned("fp8")
    assert learned("fp8") != learned("bf16"), "the products would not be in FP8"


@pytest.mark.multiproc
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", each_of(*(name for name in (*ALONE, *TWO) if name not in ("fp8", "bf16"))))
def test_every_way_learns_what_bf16_learns_but_for_the_rounding(name: str) -> None:
    np.testing.assert_allclose(learned(name), learned("bf16"), rtol=1e-2)
    assert learned(name) != learned("bf16")


@pytest.mark.multiproc
@pytest.mark.timeout(240)
def test_options_change_what_is_rounded() -> None:
    assert len({tuple(learned(name)) for name in ("fp8", "rowwise", "e4m3")}) == 3


def test_weights_and_their_names_are_those_of_the_layers_below(tmp_path: Path) -> None:
    """A run of bf16 goes on in FP8 and back: nothing of FP8 is saved."""
    sets = {**dict(each.split("=") for each in SETS), "run.folder": str(tmp_path), "run.threads": 1}
    for steps, layers in ((2, "dense"), (4, "dense+fp8"), (6, "dense")):
        run = load_config("preset:tiny", sets={**sets, "train.steps": steps}, plugins=[f"parallel-layer={layers}"])
        done = train(run, extend=steps > 2)
        assert done.steps == steps
        if layers == "dense+fp8":
            exact, rounded = (load(tmp_path, sets={"train.precision": each}) for each in ("fp32", "bf16"))
            tokens = [[*range(16)]]
            torch.testing.assert_close(rounded(tokens).float(), exact(tokens), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("sets", "layers", "said"),
    [
        (("train.precision=fp16", "scaler.loss_scale=8"), "dense+fp8,scaling=rowwise", "train.precision=fp16"),
    ],
)
def test_what_fp8_cannot_multiply_is_refused_with_the_arithmetic(sets: tuple[str, ...], layers: str, said: str) -> None:
    given = {each.partition("=")[0]: each for each in (*SETS, *sets)}
    request = Request(("preset:tiny",), sets=tuple(given.values()), plugins=(f"parallel-layer={layers}",))
    with pytest.raises(RunError, match=said):
        model_size(resolve(request))


def test_what_fp8_cannot_multiply_keeps_its_type_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    train = {"sequence_length": 12, "micro_batch_size": 1}
    context = single_process_context(train=train, dtype=torch.bfloat16)
    layers = Fp8Layers(context, Options(), DenseLayers(context))
    told = "parallel-layer=fp8: weight gradients are not in FP8: 12 tokens of a microbatch are no multiples of 16"
    assert caplog.messages == [told]
    caplog.clear()
    for inputs, outputs in ((16, 32), (16, 24), (8, 16), (16, 24)):
        layer = layers.row_linear(LinearSpec(inputs, outputs, Init("normal", 0.02), bias=True))
        assert isinstance(layer.products, Fp8Products) is (outputs == 32)
    assert caplog.messages == [
        "parallel-layer=fp8: matrices of 24 x 16 are not multiplied in FP8: their sides are no multiples of 16",
        "parallel-layer=fp8: matrices of 16 x 8 are not multiplied in FP8: their sides are no multiples of 16",
    ]


def test_layers_that_multiply_by_other_means_are_refused() -> None:
    class Others(DenseLayers):
        def row_linear(self, spec: LinearSpec) -> torch.nn.Module:
            return torch.nn.Linear(spec.inputs, spec.features, bias=spec.bias)

    context = single_process_context(train={"sequence_length": 16})
    layers = Fp8Layers(context, Options(), Others(context))
    layers.column_linear(LinearSpec(16, (LinearPart("up", 32),), Init("normal", 0.02), bias=True))
    with pytest.raises(RunError, match="does not stack on a layer of torch"):
        layers.row_linear(LinearSpec(32, 16, Init("normal", 0.02), bias=True))


def test_a_gpu_for_which_triton_finds_no_compiler_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(availability, "find_spec", lambda _: object())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "mycc")
    with pytest.raises(RunError) as refused:
        check_device("cuda:0", Options())
    assert str(refused.value) == (
        "parallel-layer=fp8 has no kernel that rounds to FP8: Triton needs a C compiler, and mycc, which CC names, is "
        "not found; install gcc, or name another compiler in CC, or leave fp8 out of parallel-layer"
    )
    (tmp_path / "mycc").touch(0o755)
    check_device("cuda:0", Options())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_gpu_rounds_and_multiplies_as_a_cpu_does(dtype: torch.dtype, scaling: Scaling) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("has no FP8")
    a, b = torch.randn(512, 1024, dtype=torch.bfloat16), torch.randn(1024, 768, dtype=torch.bfloat16)
    here = quantize(a, dtype, scaling), quantize(b.t(), E4M3, scaling)
    there = quantize(a.cuda(), dtype, scaling), quantize(b.cuda().t(), E4M3, scaling)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8).cpu())
        assert torch.equal(one.scale, other.scale.cpu())
    left, right = (each.widened().double() for each in here)
    exact, magnitudes = left @ right.t(), left.abs() @ right.abs().t()
    # The result is rounded to bf16, 2^-9 of it. Before that a CPU sums in fp32; tensor cores shift what they add to the
    # exponent of the largest, of which they keep about 14 bits, and here these errors have either sign.
    for operands, lost in ((here, 2**-20), (there, 2**-13)):
        found = product(*operands, torch.bfloat16, fast=False).cpu().double()
        assert ((found - exact).abs() <= 2**-8 * exact.abs() + lost * magnitudes).all()


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [E4M3, E5M2])
def test_a_gpu_adds_a_product_to_an_fp32_total_unrounded(grad: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("has no FP8")
    left, right, total = torch.randn(512, 1024), torch.randn(768, 1024), torch.randn(512, 768)
    here = quantize(left, grad, "tensorwise"), quantize(right, E4M3, "tensorwise")
    on_left, on_right = (Quantized(each.values.cuda(), each.scale.cuda()) for each in here)
    one, other = (each.widened().double() for each in here)
    exact, magnitudes = total + one @ other.t(), one.abs() @ other.abs().t()
    by_library, by_torch = total.cuda(), total.cuda()
    assert cublas.add_product(by_library, *on_left, *on_right)
    by_torch.add_(product(on_left, on_right, torch.float32, fast=False))
    for found in (by_library, by_torch):
        assert ((found.cpu() - exact).abs() <= 2**-13 * magnitudes).all()
    assert not cublas.add_product(total.cuda().t().contiguous().t(), *on_left, *on_right), "it adds to contiguous rows"


def test_operations_of_their_own_are_what_graphs_contain() -> None:
    with torch.device("meta"):
        matrix, scale = torch.empty(32, 16, dtype=torch.bfloat16), torch.empty(1, 1)
        found = cast(matrix, scale, E4M3)
        along, across = cast_both(matrix, scale, E5M2)
        scales = scale_of(matrix, E4M3, each=False), scale_of(matrix, E4M3, each=True)
    assert (found.shape, found.dtype) == ((32, 16), E4M3)
    assert (along.shape, along.dtype) == ((32, 16), E5M2)
    assert (across.shape, across.dtype, across.is_contiguous()) == ((16, 32), E5M2, True)
    assert [(each.shape, each.dtype) for each in scales] == [((1, 1), torch.float32), ((32, 1), torch.float32)]
