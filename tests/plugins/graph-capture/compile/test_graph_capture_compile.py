"""Compiled layers compute what eager ones do: a layer, whole steps, pipelines, split backwards and recomputation.

Most tests compile with ``aot_eager``, which runs the traced graphs by eager operations and so must keep their bits.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Parameter
from torch.nn import functional as F

import megatron_run_parallel_layer_lora as lora
from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run.contracts import Microbatch, Schedule, Segment
from megatron_run.contracts.schedule import Action
from megatron_run.errors import GraphCaptureError, InputError, PluginError
from megatron_run.files.user_cache import COMPILED
from megatron_run_engine.builtin.model.gpt import GptOptions, NormOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.nn.fused import availability
from megatron_run_engine.nn.linear import linear
from megatron_run_engine.runtime.context import BuildContext
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_graph_capture_compile.capture import CompileCapture, CompileOptions
from megatron_run_graph_capture_compile.compiler import check_compiler, find_compiler
from megatron_run_graph_capture_compile.residuals import join_residuals
from megatron_run_parallel_layer_lora import LoraLayers
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_zero_bubble.h1 import ZeroBubbleH1
from megatron_run_testing import Check
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.graph_capture import graph_capture_checks
from tests.plugins.graph_bench import EXPERTS, SMALL, Pipeline
from tests.support.changed_options import changed
from tests.support.interpreted import interpreted

CPU = torch.device("cpu")
night = pytest.mark.nightly


def compile_capture(context: BuildContext, **options: Any) -> CompileCapture:
    """The plugin's object; ``options`` are its options."""
    chosen = CompileOptions.model_validate({"backend": "aot_eager", **options})
    return CompileCapture(context, chosen, lambda: find_compiler(chosen.backend, chosen.mode))


class ExactCapture(CompileCapture):
    """Held to the bits of eager steps."""

    exact = True

    def __init__(self, context: BuildContext, **options: Any) -> None:
        chosen = CompileOptions.model_validate({"backend": "aot_eager", **options})
        super().__init__(context, chosen, lambda: find_compiler(chosen.backend, chosen.mode))


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{name}: {check.name}", marks=[pytest.mark.nightly] * (scope is None))
        for name, scope in (("blocks", None), ("all layers", ("embedding", "attn", "mlp", "head", "loss")))
        for check in graph_capture_checks(lambda context, scope=scope: ExactCapture(context, scope=scope))  # type: ignore[misc]
    ],
)
def test_it_conforms(check: Check) -> None:
    check.run()


def capture_kernels() -> list[int]:
    """That captured steps equal eager ones, of all layers; of how many norms each graph adds a residual's gradient."""
    scope, joined = ("embedding", "attn", "mlp", "head", "loss"), list[int]()

    def counted(graph: fx.GraphModule) -> None:
        join_residuals(graph)
        norms = graph.graph.find_nodes(op="call_function", target=torch.ops.megatron_run_engine.norm_gradients.default)
        joined.append(sum(len(norm.args) > 5 for norm in norms))

    checks = {each.name: each for each in graph_capture_checks(lambda context: ExactCapture(context, scope=scope))}
    with mock.patch("megatron_run_graph_capture_compile.compiled.join_residuals", counted):
        checks["captured steps equal eager ones in losses and gradients"].run()
    return joined


@pytest.mark.nightly  # half a minute of interpreted steps; residuals and writes have tests of graphs
@pytest.mark.multiproc
def test_kernels_of_a_gpu_are_operations_of_the_graphs() -> None:
    """They write over their arguments, which functionalization refuses of operators that it does not know."""
    assert 1 in interpreted(capture_kernels)


THROUGH_INDUCTOR = graph_capture_checks(lambda context: compile_capture(context, backend="inductor"))


@pytest.mark.nightly  # the C++ compiler works for minutes; aot_eager traces and splits the same graphs
@pytest.mark.parametrize("check", THROUGH_INDUCTOR, ids=lambda check: check.name)
def test_it_conforms_through_inductor_but_for_rounding(check: Check) -> None:
    check.run()


def pair(schedule: Schedule, microbatches: int, **settings: Any) -> tuple[Pipeline, Pipeline]:
    """The same pipeline twice: the second compiles after its first step."""
    eager, compiled = (Pipeline(schedule, microbatches, make=ExactCapture, **settings) for _ in range(2))  # type: ignore[arg-type]
    assert eager.step(1).equals(compiled.step(1))
    return eager, compiled


LLAMA = GptOptions(
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    vocab_size=32,
    dropout=0.0,
    position="rope",
    norm=NormOptions(kind="rmsnorm"),
    activation="swiglu",
    tie_embeddings=False,
)


def adapted(context: BuildContext) -> LoraLayers:
    """Dense layers that are frozen, with adapters on every matrix, which drop some of their input."""
    options = lora.Options(rank=4, targets=("all",), adapter_dropout=0.4)
    return LoraLayers(context, options, DenseLayers(context))


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        pytest.param(ZeroBubbleH1(), {"stages": 2}, id="a split backward"),
        pytest.param(Sequential(), {"model": LLAMA, "dtype": torch.bfloat16}, id="llama in bf16", marks=night),
        # the scope of a GPU has experts, and a split backward two stages
        pytest.param(OneForwardOneBackward(), {"stages": 2, "model": EXPERTS}, id="experts under 1f1b", marks=night),
        pytest.param(Sequential(), {"layers": adapted}, id="adapters", marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_steps_leave_the_bits_of_eager_ones(schedule: Schedule, settings: dict[str, Any]) -> None:
    eager, compiled = pair(schedule, 3, **settings)
    assert all(size.regions for size in compiled.start_capture())
    for number in (2, 3):
        mine, other = compiled.step(number), eager.step(number)
        assert all(map(torch.equal, mine.losses, other.losses))
        assert all(map(torch.equal, mine.weights, other.weights))


def test_blocks_that_look_alike_share_one_compilation() -> None:
    model = SMALL.model_copy(update={"num_layers": 4})
    _, compiled = pair(Sequential(), 1, model=model)
    (size,) = compiled.start_capture()
    assert (size.regions, size.graphs) == (8, 4)  # attn and mlp apart, since both draw: a forward and a backward each
    assert str(size) == "8 regions, 4 graphs"


def one_layer(fn: Any, x: Tensor, *params: Parameter, **options: Any) -> tuple[CompileCapture, Any, BuildContext]:
    """A compiled layer that is ``fn`` alone."""
    context = single_process_context(dtype=torch.float32)
    for parameter in params:
        context.gradients.adopt(parameter, "weight")
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    capture = compile_capture(context, scope=("attn",), **options)
    (region,) = capture.regions([[Segment("attn", 3, 0, lambda x: fn(x, context), ("x",), ("x",), params)]])
    example = torch.empty_strided(x.shape, x.stride(), device="meta", requires_grad=x.requires_grad)
    capture.capture([region], [Action("F", 0, 0), Action("B", 0, 0)], {region: (example,)})
    return capture, region, context


MICROBATCH = Microbatch(0, 1, 0, {})


def test_a_deferred_backward_leaves_weight_gradients_to_w() -> None:
    weight, x = Parameter(torch.randn(3, 4)), torch.randn(5, 2, 4, requires_grad=True)
    capture, region, context = one_layer(lambda x, c: linear(x, weight, None, c.gradients).tanh(), x, weight)
    weight.main_grad.zero_()  # type: ignore[attr-defined]  # a capture may leave anything there
    (y,) = capture.replay(region, MICROBATCH, x)
    with context.gradients.deferring((0, 0)):
        y.sum().backward()
    assert x.grad is not None
    assert not main_grad(weight).any()
    context.gradients.run_deferred((0, 0))
    other = weight.detach().clone().requires_grad_()
    (x.detach() @ other.t()).tanh().sum().backward()
    torch.testing.assert_close(main_grad(weight), other.grad)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the run's log was told; the compiler has logs of its own."""
    return [record.getMessage() for record in caplog.records if record.name == "megatron_run_testing"]


def test_another_shape_is_compiled_again_and_said_once_up_to_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    x, runs = torch.randn(4, 4, requires_grad=True), []

    def double(x: Tensor, _: Any) -> Tensor:
        runs.append(x.shape)
        return x * 2

    capture, region, _ = one_layer(double, x, recompile_limit=2)
    traced = len(runs)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(capture.replay(region, MICROBATCH, x)[0], 2 * x)
        assert len(runs) == traced  # a compiled layer runs none of its Python
        for _ in range(2):
            assert torch.equal(capture.replay(region, MICROBATCH, x[:2])[0], 2 * x[:2])
        (again,) = said(caplog)
        assert "attn of layer 3" in again
        for _ in range(2):
            assert torch.equal(capture.replay(region, MICROBATCH, x[:1])[0], 2 * x[:1])
    (_, limited) = said(caplog)
    assert "recompile_limit" in limited


def test_another_shape_in_the_middle_of_a_step_keeps_the_gradients_so_far() -> None:
    """A layer that divides by a norm has no finite gradient for the zeros with which it is traced."""
    weight, x = Parameter(torch.randn(3, 4)), torch.randn(5, 4, requires_grad=True)

    def on_sphere(x: Tensor, context: BuildContext) -> Tensor:
        return linear(x / x.norm(dim=-1, keepdim=True), weight, None, context.gradients)

    capture, region, _ = one_layer(on_sphere, x, weight)
    main_grad(weight).zero_()
    for length in (5, 2):
        capture.replay(region, MICROBATCH, x[:length])[0].sum().backward()
    other = weight.detach().clone().requires_grad_()
    for length in (5, 2):
        (x[:length] / x[:length].norm(dim=-1, keepdim=True) @ other.t()).sum().backward()
    torch.testing.assert_close(main_grad(weight), other.grad)


def test_another_shape_is_an_error_with_strict() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    capture, region, _ = one_layer(lambda x, _: x * 2, x, strict=True)
    with pytest.raises(GraphCaptureError, match="no longer fits"):
        capture.replay(region, MICROBATCH, x[:2])


def test_an_input_with_other_strides_is_laid_out_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(graph: Any, examples: Any) -> Any:
        """As a compiled kernel, which reads memory by the strides that it was compiled for."""

        def run(*tensors: Tensor) -> Any:
            assert [x.stride() for x in tensors] == [x.stride() for x in examples]
            return graph(*tensors)

        return run

    monkeypatch.setattr(f"{__name__}.find_compiler", lambda backend, mode: strict)
    x = torch.randn(4, 6, requires_grad=True)
    capture, region, _ = one_layer(lambda x, _: x.exp() * 2, x)
    turned = torch.randn(6, 4).t().requires_grad_()
    (y,) = capture.replay(region, MICROBATCH, turned)
    y.backward(torch.ones(6, 4).t())
    torch.testing.assert_close(y, turned.exp() * 2)
    torch.testing.assert_close(turned.grad, y.detach())


def test_a_parameter_that_is_frozen_later_leads_to_another_compilation() -> None:
    weight, x = Parameter(torch.randn(3, 4)), torch.randn(5, 2, 4, requires_grad=True)
    capture, _, _ = one_layer(lambda x, c: linear(x, weight, None, c.gradients), x, weight)
    assert not capture.mismatch(())
    weight.requires_grad_(False)
    assert "1 parameters were frozen" in capture.mismatch(())
    capture.invalidate("frozen")
    assert capture.mismatch(())


def test_a_layer_that_computes_by_other_means_is_refused() -> None:
    def outside(x: Tensor, _: Any) -> Tensor:
        with torch._C._DisableTorchDispatch():  # as the kernels of a library of its own
            made = torch.full((4, 4), 2.0)
        return x * made

    with pytest.raises(GraphCaptureError, match="other code than PyTorch's operations"):
        one_layer(outside, torch.randn(4, 4, requires_grad=True))


def test_a_layer_that_counts_in_a_tensor_is_refused() -> None:
    seen = torch.zeros(4)

    def counts(x: Tensor, _: Any) -> Tensor:
        seen.add_(x.detach().sum(0))
        return x * 2

    with pytest.raises(GraphCaptureError, match="writes to a tensor"):
        one_layer(counts, torch.randn(4, 4, requires_grad=True))


def test_what_follows_the_routing_is_refused_with_the_reason() -> None:
    model = changed(EXPERTS, {"experts.capacity_factor": 1.0})
    with pytest.raises(InputError, match="segment moe_experts of layer 0 cannot be captured: its shapes follow"):
        Pipeline(Sequential(), 1, model=model, make=lambda c: compile_capture(c, scope=("moe_experts",)))  # type: ignore[arg-type,return-value]


def test_nothing_is_compiled_into_a_folder_in_which_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there is loaded as a library."""
    monkeypatch.setenv(COMPILED, "unset")  # restored afterwards, whatever is written meanwhile
    monkeypatch.delenv(COMPILED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "megatron-run").mkdir()
    (tmp_path / "megatron-run").chmod(0o777)
    for check in (lambda: check_compiler(CPU, "inductor"), lambda: find_compiler("inductor", "default")):
        with pytest.raises(PluginError, match="no folder for compiled libraries"):
            check()


@pytest.mark.parametrize(
    ("message", "shown"),
    [("TensorFloat32 tensor cores for float32", 0), ("\nOnline softmax is disabled on the fly", 0), ("a fault", 1)],
)
def test_warnings_of_inductor_that_tell_of_no_fault_are_not_shown(
    message: str, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warns(*_: object) -> Any:
        warnings.warn(message, stacklevel=1)
        return lambda *_: ()

    monkeypatch.setattr("megatron_run_graph_capture_compile.compiler._through_inductor", warns)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        find_compiler("inductor", "default")(torch.fx.GraphModule({}, torch.fx.Graph()), [])
    assert len(found) == shown


def compiled_here(
    function: Callable[..., Tensor], examples: Sequence[Tensor], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[..., Sequence[Tensor]], str]:
    """What inductor makes of ``function``, from nothing that was compiled before, and its code."""
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setenv(COMPILED, str(folder))
    graph = make_fx(lambda *given: (function(*given),), tracing_mode="fake")(*examples)
    compiled, (code,) = run_and_get_code(find_compiler("inductor", "default"), graph, examples)
    return compiled, code


@night  # inductor is imported, and compiles C++, for ten seconds
def test_kernels_are_compiled_for_the_sizes_that_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are arguments cost a division for each index that is taken apart."""
    x = torch.randn(6, 8)
    _, code = compiled_here(lambda x: x.sin().t().contiguous(), [x], tmp_path, monkeypatch)
    assert "def call(" in code
    assert ".size()" not in code


@night
def test_dropout_draws_over_values_as_they_lie_in_eager_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where PyTorch lets inductor lay out what it is given: tokens are [b, s], and what is embedded [s, b, h]."""
    from torch._inductor import lowering

    def embedded(tokens: Tensor, word: Tensor, position: Tensor) -> Tensor:
        return torch.native_dropout(F.embedding(tokens.t(), word) + position[:, None], 0.5, True)[0]

    dropout = torch.ops.aten.native_dropout.default
    monkeypatch.setattr(lowering, "_maybe_layout_constraints", dict(lowering._maybe_layout_constraints))
    lowering._maybe_layout_constraints.pop(dropout, None)
    given = torch.randint(50, (6, 8)), torch.randn(50, 16), torch.randn(8, 16)
    compiled, _ = compiled_here(embedded, given, tmp_path, monkeypatch)
    torch.manual_seed(1)
    expected = embedded(*given)
    torch.manual_seed(1)
    (found,) = compiled(*given)
    assert torch.equal(found, expected)


def test_a_missing_compiler_or_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PluginError, match=r"needs a C\+\+ compiler, and no-such-compiler is not found"):
        check_compiler(CPU, "inductor")
    check_compiler(CPU, "aot_eager")
    monkeypatch.setattr(availability, "find_spec", lambda name: None)
    with pytest.raises(PluginError, match="no compiler for a GPU: Triton is not installed; type: pip install triton"):
        check_compiler(torch.device("cuda"), "inductor")
    with pytest.raises(PluginError, match=r"graph-capture\.backend=inductr is not .*; did you mean 'inductor'"):
        check_compiler(CPU, "inductr")
