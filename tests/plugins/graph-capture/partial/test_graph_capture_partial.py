"""Captured layers compute what eager ones do, bit for bit: bars of a layer, of steps and of pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run.contracts import Microbatch, Schedule, Segment
from megatron_run.contracts.schedule import Action
from megatron_run.errors import InputError
from megatron_run_engine.builtin.model.gpt import GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_engine.nn import LayerNorm, attention
from megatron_run_engine.nn.linear import linear
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_interleaved import Interleaved
from megatron_run_schedule_zero_bubble.h1 import ZeroBubbleH1
from megatron_run_testing import Check
from megatron_run_testing.build_contexts import single_process_context
from megatron_run_testing.graph_capture import graph_capture_checks
from tests.plugins.graph_bench import EXPERTS, Pipeline, one_region, partial_capture
from tests.support.changed_options import changed

VARIANTS: dict[str, dict[str, Any]] = {
    "attention": {"scope": ("attn",)},
    "everything": {"scope": ("embedding", "attn", "mlp", "head", "loss")},
    "everything, graphs by slot": {
        "scope": ("embedding", "attn", "mlp", "head", "loss"),
        "graph_reuse": "per_slot",
    },
    "without chains": {"chain": False},
}
"""Bar 4 and the contract itself."""


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{name}: {check.name}", marks=[pytest.mark.nightly] * (name == "attention"))
        for name, options in VARIANTS.items()
        for check in graph_capture_checks(lambda context, options=options: partial_capture(context, **options))  # type: ignore[misc]
    ],
)
def test_it_conforms(check: Check) -> None:
    check.run()


class Rounding:
    """A region in which norms round what they return to ``bfloat16``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._within, normalise = False, LayerNorm.forward

        def forward(norm: LayerNorm, x: Tensor) -> Tensor:
            y = normalise(norm, x)
            return y.to(torch.bfloat16).to(y.dtype) if self._within else y

        monkeypatch.setattr(LayerNorm, "forward", forward)
        monkeypatch.setattr(DenseLayers, "forward_pass", lambda _: self._region())

    @contextmanager
    def _region(self) -> Iterator[None]:
        self._within = True
        yield
        self._within = False


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_what_layers_say_that_a_forward_runs_in_is_captured(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture without it would compute something else, and nobody would be told."""
    plain = Pipeline(OneForwardOneBackward(), 2, stages=2, **options).step(1)
    Rounding(monkeypatch)
    eager, captured = (Pipeline(OneForwardOneBackward(), 2, stages=2, **options) for _ in range(2))
    first = eager.step(1)
    assert first.equals(captured.step(1))
    assert not first.equals(plain), "it makes a difference"
    captured.start_capture()
    assert eager.step(2).equals(captured.step(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
def test_a_layers_output_and_gradients_are_those_of_eager(
    dtype: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bar 4. Both ways of attention are recorded: one kernel, and matrix products with a softmax between them."""
    monkeypatch.setattr(attention, "matmuls_are_faster", lambda *_: not fused)
    model = GptOptions(num_layers=2, hidden_size=32, num_heads=4, vocab_size=32, dropout=0.0)
    eager, captured = (Pipeline(Sequential(), 1, model=model, dtype=dtype) for _ in range(2))
    assert eager.step(1).equals(captured.step(1))
    (size,) = captured.start_capture()
    assert size.regions == 2  # without dropout attn and mlp go together
    stage, before = captured.stages[0], [main_grad(p).clone() for p in captured.stages[0].parameters]
    assert all(map(torch.equal, before, [main_grad(p) for p in stage.parameters]))
    for number in (2, 3):
        assert eager.step(number).equals(captured.step(number))
        for mine, other in zip(stage.parameters, eager.stages[0].parameters, strict=True):
            assert torch.equal(main_grad(mine), main_grad(other))


def test_twenty_steps_with_dropout_leave_the_bits_and_the_stream_of_eager_ones() -> None:
    """Bar 5, one process."""
    eager, captured = (Pipeline(Sequential(), 2) for _ in range(2))
    for number in range(1, 21):
        if number == 3:
            captured.start_capture()
        assert eager.step(number).equals(captured.step(number)), number


#: Four stages, and as many steps as the bar asks for.
MANY = [pytest.param(4, chunks, *size, marks=pytest.mark.nightly) for chunks in (1, 2) for size in ((8, 20), (16, 2))]


@pytest.mark.parametrize(("stages", "chunks", "microbatches", "steps"), [(4, 1, 5, 3), (2, 2, 4, 3), *MANY])
def test_pipelines_leave_the_bits_of_eager_ones(stages: int, chunks: int, microbatches: int, steps: int) -> None:
    """Bar 5. The captured scope leaves eager segments between the regions."""
    schedule: Schedule = OneForwardOneBackward() if chunks == 1 else Interleaved()
    model = GptOptions(num_layers=stages * chunks, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.1)
    eager, captured = (
        Pipeline(schedule, microbatches, stages=stages, chunks=chunks, model=model, scope=("attn",)) for _ in range(2)
    )
    for number in range(1, steps + 1):
        if number == 2:
            captured.start_capture()
        assert eager.step(number).equals(captured.step(number)), number


@pytest.mark.parametrize(
    ("scope", "reuse"),
    [
        (("attn",), "per_microbatch"),
        (("mlp",), "per_slot"),
        (("attn", "mlp"), "per_microbatch"),
        (("attn", "mlp"), "per_slot"),
        pytest.param(("attn",), "per_slot", marks=pytest.mark.nightly),
        pytest.param(("mlp",), "per_microbatch", marks=pytest.mark.nightly),
    ],
)
def test_a_split_backward_leaves_the_bits_of_an_eager_one(scope: tuple[str, ...], reuse: str) -> None:
    """What eager layers put off to W still reads what the graphs around them gave out."""
    eager, captured = (Pipeline(ZeroBubbleH1(), 3, stages=2, scope=scope, graph_reuse=reuse) for _ in range(2))
    eager.step(1), captured.step(1)
    captured.start_capture()
    for number in (2, 3):
        mine, other = captured.step(number), eager.step(number)
        assert all(map(torch.equal, mine.losses, other.losses))
        assert all(map(torch.equal, mine.weights, other.weights))


def test_w_that_follows_at_once_reads_what_the_backward_gave_out() -> None:
    """Without dropout the last eager layer puts off a product with the very gradient that a graph handed it."""
    model = GptOptions(num_layers=2, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.0)
    eager, captured = (
        Pipeline(ZeroBubbleH1(), 3, stages=2, model=model, scope=("embedding", "attn", "head", "loss"))
        for _ in range(2)
    )
    eager.step(1), captured.step(1)
    captured.start_capture()
    assert all(map(torch.equal, eager.step(2).weights, captured.step(2).weights))


#: An expert takes at most its even share of tokens.
CAPACITY = {"experts.capacity_factor": 1.0, "experts.shared.ffn_size": 16}
MIXTURES = {"dropless": EXPERTS, "capacity": changed(EXPERTS, CAPACITY)}
#: How many of them are captured.
SEGMENTS = ("attn", "moe_router", "moe_preprocess", "moe_combine")
#: What leaves a graph into eager code: weights of the router, maps of tokens, what experts made of them.
DAILY = (("dropless", 2), ("capacity", 3), ("capacity", 4))


@pytest.mark.parametrize(
    ("model", "count"),
    [
        pytest.param(model, count, id=f"{model}-{SEGMENTS[count - 1]}", marks=[pytest.mark.nightly] * (not daily))
        for model in MIXTURES
        for count in range(1, 5)
        for daily in [(model, count) in DAILY]
    ],
)
def test_mixtures_of_experts_leave_the_bits_of_eager_ones(model: str, count: int) -> None:
    """Bar 11, under 1F1B: what is dynamic runs eagerly between the regions."""
    scope = SEGMENTS[:count]
    eager, captured = (
        Pipeline(OneForwardOneBackward(), 3, stages=2, model=MIXTURES[model], scope=scope) for _ in range(2)
    )
    eager.step(1), captured.step(1)
    sizes = captured.start_capture()
    assert [size.regions for size in sizes] == [1 + ("moe_combine" in scope)] * 2
    for number in (2, 3):
        assert eager.step(number).equals(captured.step(number))


#: Shapes that follow no routing.
PADDED = changed(EXPERTS, {**CAPACITY, "experts.pad_to_capacity": True})
WHOLE_LAYER = ("moe_router", "moe_preprocess", "moe_dispatch", "moe_experts", "moe_combine")


@pytest.mark.parametrize(
    ("model", "reuse"),
    [
        ("dropless", "per_slot"),
        ("padded", "per_microbatch"),
        pytest.param("dropless", "per_microbatch", marks=pytest.mark.nightly),
        pytest.param("padded", "per_slot", marks=pytest.mark.nightly),
    ],
)
def test_experts_of_fixed_shapes_are_captured_whole_and_leave_the_bits_of_eager_ones(model: str, reuse: str) -> None:
    """On one expert-parallel rank those without a capacity too: their counts stay on the device."""
    options = {"dropless": EXPERTS, "padded": PADDED}[model]
    eager, captured = (
        Pipeline(OneForwardOneBackward(), 3, stages=2, model=options, scope=("attn", *WHOLE_LAYER), graph_reuse=reuse)
        for _ in range(2)
    )
    eager.step(1), captured.step(1)
    sizes = captured.start_capture()
    assert [size.regions for size in sizes] == [2, 2]  # a layer's attention and all of its experts
    for number in (2, 3):
        assert eager.step(number).equals(captured.step(number))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("moe_dispatch", "the host reads how many tokens each expert gets, since model.experts.capacity_factor drops"),
        (
            "moe_experts",
            "its shapes follow how many tokens each expert gets, since model.experts.capacity_factor drops",
        ),
    ],
)
def test_what_follows_the_routing_is_refused_with_the_reason(name: str, reason: str) -> None:
    """Bar 11."""
    with pytest.raises(InputError, match=f"segment {name} of layer 0 cannot be captured: {reason} some of them; not"):
        Pipeline(Sequential(), 1, model=MIXTURES["capacity"], scope=("attn", name))


class Counted(nn.Module):
    """Counts its calls in Python, and in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.randn(4, 4))
        self.calls, self.seen = 0, torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.add_(x.detach().mean(0))
        return torch.tanh(x @ self.weight)


def test_a_replay_runs_no_python_of_the_module_and_all_of_its_operations() -> None:
    """Bar 10."""
    layer, x = Counted(), torch.randn(3, 4, requires_grad=True)
    capture, region, _ = one_region(layer, [x], params=[layer.weight])
    calls = layer.calls
    assert not layer.seen.any(), "a capture leaves nothing behind in what was there before"
    for step in (1, 2):
        (out,) = capture.replay(region, _microbatch(step), x)
        out.sum().backward()
        torch.testing.assert_close(layer.seen, step * x.detach().mean(0))
    assert layer.calls == calls
    assert torch.equal(
        main_grad(layer.weight), 2 * torch.autograd.grad((x @ layer.weight).tanh().sum(), layer.weight)[0]
    )


def _microbatch(step: int) -> Microbatch:
    return Microbatch(0, step, 0, {})


def test_a_gradient_that_a_region_only_passes_on_is_a_copy() -> None:
    """Else it lay where the next region's backward puts its own, while an eager layer keeps it for W."""
    context = single_process_context(dtype=torch.float32)
    weight = Parameter(torch.randn(4, 4))
    weight.main_grad = torch.zeros(4, 4)  # type: ignore[attr-defined]  # where the engine keeps it
    capture = partial_capture(context, scope=("first", "last"))

    def product(h: Tensor) -> Tensor:
        return linear(h, weight, None, context.gradients)

    segments = [
        Segment("first", 0, 0, torch.tanh, ("x",), ("x",), ()),
        Segment("between", 0, 1, product, ("x",), ("x",), (weight,)),
        Segment("last", 0, 2, lambda y: y + 1, ("x",), ("x",), ()),
    ]
    first, last = capture.regions([segments])
    actions = [Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0)]
    example = torch.empty(3, 4, device="meta", requires_grad=True)
    capture.capture([first, last], actions, {first: (example,), last: (example,)})
    x, gradient = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    (h,) = capture.replay(first, _microbatch(1), x)
    (out,) = capture.replay(last, _microbatch(1), product(h))
    with context.gradients.deferring((0, 0)):
        out.backward(gradient)
    context.gradients.run_deferred((0, 0))
    torch.testing.assert_close(main_grad(weight), gradient.t() @ x.detach().tanh())
