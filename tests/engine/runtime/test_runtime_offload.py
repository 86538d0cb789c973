"""Saved activations that wait in host memory: equal bits, counts, and copies that are as late as they may be."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from megatron_run.contracts import Microbatch, Segment
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.estimate.step_memory import LiveBytes
from megatron_run_engine.host.process import deterministic_kernels
from megatron_run_engine.runtime.copies import CpuCopies
from megatron_run_engine.runtime.metrics import Metrics
from megatron_run_engine.runtime.offload import METRICS, Offload, make_offload
from megatron_run_engine.runtime.rng import RandomStreams
from megatron_run_engine.runtime.segments import SegmentRunner
from megatron_run_testing.build_contexts import example_microbatch, logical_gradients, single_process_context
from megatron_run_testing.model import Built, build_model
from tests.support.device_memory import Device
from tests.support.late_copies import LateCopies

OPTIONS = GptOptions(num_layers=3, hidden_size=16, num_heads=2, vocab_size=61, position="rope")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """That of a device; where there is one, with kernels that add in one order."""
    with deterministic_kernels("cuda") if request.node.get_closest_marker("gpu") else Device():
        yield


class Bench:
    """A gpt whose segments are offloaded by late copies."""

    def __init__(self, **train: Any) -> None:
        self.log: list[str] = []
        context = single_process_context(OPTIONS, dtype=torch.float32, train=train)
        self.out, self.back = (LateCopies(name, self.log, to_host=name == "out") for name in ("out", "back"))
        self.offload = Offload(CPU, self.out, self.back, smallest=1024)
        if context.train.offload != "none":
            context = replace(context, segments=SegmentRunner(context.rng, self.offload))
        self.built: Built = build_model(lambda context, _: Gpt(context, OPTIONS), context, OPTIONS)
        self.built.train(mode=True)
        self.gradients = context.gradients

    def forward(self, index: int) -> Tensor:
        example = replace(example_microbatch(61, seed=index), index=index, sample0=2 * index)
        return self.built.forward(example)[0].losses["lm"][0]

    def steps(self) -> dict[str, Tensor]:
        """Forwards and backwards of three microbatches as 1F1B has them; the gradients of all."""
        first, second = self.forward(0), self.forward(1)
        first.backward()
        third = self.forward(2)
        second.backward()
        third.backward()
        return logical_gradients(self.built.infos)


@pytest.mark.parametrize(
    "train",
    [
        {"offload": "full"},
        {"offload": ("attn",)},
        {"offload": ("mlp", "loss")},
        {"offload": ("embedding", "attn", "mlp", "head", "loss")},
        {"offload": "full", "recompute": "full"},
        {"offload": ("attn", "mlp"), "recompute": ("core_attn", "mlp")},
    ],
)
def test_a_copy_as_late_as_allowed_changes_no_bit(train: dict[str, Any]) -> None:
    """Each wait is needed: without it a NaN would be read."""
    plain, bench = Bench(), Bench(**train)
    expected, found = plain.steps(), bench.steps()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert bench.back.lost == 0
    assert bench.offload.traffic.held == 0, "a backward has read it all"


def test_all_that_left_comes_back_except_what_the_next_backward_reads_at_once() -> None:
    bench = Bench(offload=("mlp",))
    loss, traffic = bench.forward(0), bench.offload.traffic
    out = traffic.out
    each = out // OPTIONS.num_layers
    assert out == traffic.held == traffic.peak == OPTIONS.num_layers * each > 0
    loss.backward()
    assert traffic.back == out - each, "the last segment's tensors were on the device still"
    assert (traffic.held, traffic.peak) == (0, out)


def test_two_microbatches_in_flight_hold_twice_the_memory() -> None:
    bench = Bench(offload="full")
    bench.forward(0)  # dropped at once
    assert bench.offload.traffic.held == 0
    losses = [bench.forward(0)]
    one = bench.offload.traffic.held
    losses.append(bench.forward(1))
    assert bench.offload.traffic.held == 2 * one > 0
    del losses


def test_a_segment_is_under_way_while_the_one_after_it_computes() -> None:
    """Three layers: the third is on the device still; the second is fetched with it, and the first with the second."""
    bench = Bench(offload=("attn",))
    loss = bench.forward(0)
    assert bench.log == ["out starts", "out starts", "out waits", "out starts", "out waits"]
    bench.log.clear()
    submit = bench.gradients.submit

    def computing(*given: Any, **more: Any) -> None:
        bench.log.append("linear")
        submit(*given, **more)

    bench.gradients.submit = computing  # type: ignore[method-assign]  # the layers hold this very object
    loss.backward()
    layer = ["linear"] * 4  # output and qkv of the attention, then both of the feed-forward part before it
    fetched = ["back starts", *layer, "back waits"]
    assert bench.log == ["linear"] * 3 + 2 * fetched + ["linear"] * 3  # the embedding too


class Toy:
    """Segments that are functions of one tensor of 8 x 8."""

    def __init__(self, smallest: int = 1) -> None:
        self.back = LateCopies("back", [], to_host=False)
        self.offload = Offload(CPU, CpuCopies(), self.back, smallest)
        self.runner = SegmentRunner(RandomStreams(1, CPU), self.offload)
        self.weight = nn.Parameter(torch.ones(8, 8))

    def run(self, fn: Any, x: Tensor, *, layer: int = 0, train: bool = True) -> Tensor:
        segment = Segment("a", layer, 0, fn, ("x",), ("x",), (self.weight,), offload=True)
        environment = {"x": x}
        self.runner.run([segment], Microbatch(0, 1, 0, {}, train), environment)
        return environment["x"]

    def moved(self, fn: Any, *, train: bool = True) -> int:
        x = torch.ones(8, 8, requires_grad=True)
        kept = self.run(fn, x, train=train)  # keeps the graph
        assert kept.shape
        return self.offload.traffic.out


def test_storages_move_once_and_parameters_inputs_and_small_tensors_never() -> None:
    size = 8 * 8 * 4

    def views(x: Tensor) -> Tensor:
        y = x + 1  # one storage, of which three views are saved
        return y[:4].square() + y[4:].square() + y.t()[:4].square()

    assert Toy().moved(views) == size
    toy = Toy()
    assert toy.moved(lambda x: x @ toy.weight.t()) == 0, "both are leaves, or views of one"
    assert Toy().moved(lambda x: x.square()) == 0, "the executor holds the chunk's input"
    assert Toy(smallest=size + 1).moved(views) == 0
    assert Toy().moved(views, train=False) == 0
    toy = Toy()
    table = torch.ones(8, 8)
    assert toy.moved(lambda x: x * table) == size
    toy = Toy()
    toy.runner.keep_on_device([table])
    assert toy.moved(lambda x: x * table[:]) == 0


def test_memory_that_nobody_reads_is_kept_until_the_copy_to_it_is_done() -> None:
    """The second segment does not differentiate the first, which is fetched ahead and dropped."""
    toy = Toy()
    for _ in range(2):
        first = toy.run(lambda x: (x + 1).square(), torch.ones(8, 8, requires_grad=True))
        second = toy.run(lambda x: (x.detach() * toy.weight + 1).square(), first, layer=1)
        second.sum().backward()
        assert toy.back.log[-1] == "back starts"
        del first, second
    assert toy.back.log == ["back starts", "back waits", "back starts"]
    assert toy.back.lost == 0


def test_a_failed_segment_moves_nothing() -> None:
    toy = Toy()

    def failing(x: Tensor) -> Tensor:
        (x + 1).square()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        toy.moved(failing)
    assert toy.offload.traffic.out == 0


def test_a_step_reports_what_moved() -> None:
    metrics = Metrics(CPU)
    context = single_process_context(train={"offload": ("attn",)})
    assert make_offload(single_process_context().train, CPU, metrics) is None
    offload = make_offload(context.train, CPU, metrics)
    assert offload is not None
    offload.traffic.out, offload.traffic.back = 3 * 2**20, 2**20
    offload.traffic.hold(2 * 2**20)
    for out, back in ((3.0, 1.0), (0.0, 0.0)):
        sums = metrics.collect(context.groups).tolist()
        assert metrics.means(sums) == dict(zip(METRICS, (out, back, 2.0), strict=True))


class Host(CpuCopies):
    """Host memory that does not count as the device's."""

    def buffer(self, size: int) -> Tensor:
        with _disable_current_modes():
            return super().buffer(size)


@pytest.mark.parametrize(
    "recompute",
    ["none", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("full", ("core_attn",))), ("attn", "mlp")],
)
def test_no_step_holds_more_with_offload_than_without(recompute: Any) -> None:
    """Bytes of tensors at the peak of forwards, and of backwards, of three microbatches in flight."""
    options = GptOptions(num_layers=6, hidden_size=64, num_heads=2, vocab_size=61)
    peaks: dict[str, tuple[int, int]] = {}
    for offload in ("none", "full"):
        train = {"offload": offload, "recompute": recompute, "sequence_length": 64, "micro_batch_size": 2}
        context = single_process_context(options, dtype=torch.bfloat16, train=train)
        if offload == "full":
            context = replace(context, segments=SegmentRunner(context.rng, Offload(CPU, Host(), CpuCopies(), 1024)))
        model = build_model(lambda context, _: Gpt(context, options), context, options).train(mode=True)
        with LiveBytes() as live:
            losses = []
            for index in range(3):
                example = example_microbatch(61, batch=2, length=64, seed=index)
                losses.append(model.forward(replace(example, index=index, sample0=2 * index))[0].losses["lm"][0])
            forwards, live.peak = live.peak, 0
            for each in losses:
                each.backward()
            peaks[offload] = forwards, live.peak
    assert peaks["full"][0] < 0.9 * peaks["none"][0]
    assert peaks["full"][1] < 0.9 * peaks["none"][1]


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "full", ("core_attn",)])
def test_a_gpu_frees_the_memory_and_keeps_the_bits(recompute: Any) -> None:
    """Several microbatches in flight, large enough that a missing wait shows."""
    options = GptOptions(num_layers=8, hidden_size=512, num_heads=8, vocab_size=512, dropout=0.1)
    device, found, peaks = torch.device("cuda", torch.cuda.current_device()), [], list[int]()
    for offload in ("none", "full"):
        train = {"offload": offload, "recompute": recompute, "sequence_length": 512, "micro_batch_size": 4}
        context = single_process_context(options, dtype=torch.bfloat16, device=device, train=train)
        model = build_model(lambda context, _: Gpt(context, options), context, options).train(mode=True)
        gc.collect()  # models are full of cycles: the first one would count as the second one's
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses = []
        for index in range(3):
            example = example_microbatch(512, batch=4, length=512, seed=index)
            fields = {name: field.to(device) for name, field in example.fields.items()}
            losses.append(model.forward(replace(example, index=index, sample0=4 * index, fields=fields))[0].losses)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        for each in losses:
            each["lm"][0].backward()
        found.append(logical_gradients(model.infos))
        del losses, each, model, context
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert peaks[1] < peaks[0]
