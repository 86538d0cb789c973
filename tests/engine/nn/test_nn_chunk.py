"""A chunk and how it runs its segments."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_run.contracts import StackedLayers
from megatron_run.contracts.schedule import Place
from megatron_run.errors import InputError
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions
from megatron_run_engine.builtin.parallel_layer.dense import DenseLayers
from megatron_run_testing.build_contexts import example_microbatch, logical_gradients, prepare, single_process_context
from megatron_run_testing.model import Built, build_model

OPTIONS = GptOptions(num_layers=2, hidden_size=16, num_heads=2, vocab_size=61)
MICROBATCH = example_microbatch(61)


def built(**train: Any) -> tuple[Built, Counter[str]]:
    """A whole model, and how often each kind of segment ran."""
    context, runs = single_process_context(OPTIONS, train=train), Counter[str]()
    model = build_model(lambda context, _: Gpt(context, OPTIONS), context, OPTIONS)
    names = {(segment.layer, segment.index): segment.name for segment in model.chunks[0].segments()}
    position = context.rng.position

    def counted(microbatch: Any, layer: int, index: int) -> None:
        runs[names[layer, index]] += 1
        position(microbatch, layer, index)

    context.rng.position = counted  # type: ignore[assignment]  # called before each run of a segment
    return model, runs


def test_segments_run_in_forward_order() -> None:
    chunk = built()[0].chunks[0]
    order = [(segment.name, segment.layer, segment.index) for segment in chunk.segments()]
    blocks = [("attn", 0, 0), ("mlp", 0, 1), ("attn", 1, 0), ("mlp", 1, 1)]
    assert order == [("embedding", -1, 0), *blocks, ("head", 2, 0), ("loss", 2, 1)]
    assert {segment.why_eager for segment in chunk.segments()} == {""}


def test_a_forward_runs_within_what_the_layers_say() -> None:
    happened: list[str] = []

    class Within(StackedLayers):
        @contextmanager
        def forward_pass(self) -> Iterator[None]:
            happened.append("enter")
            yield
            happened.append("leave")

    context = single_process_context(OPTIONS)
    run = context.segments.run

    def noted(segments: Any, microbatch: Any, environment: Any) -> None:
        happened.append(segments[0].name)
        run(segments, microbatch, environment)

    context.segments.run = noted  # type: ignore[method-assign]  # the chunk holds this very runner
    layers = StackedLayers(Within(DenseLayers(context)))
    chunk = Gpt(context, OPTIONS).build_chunk(0, (Place(0, 0, range(2)),), layers, {})
    for _ in range(2):
        chunk(None, MICROBATCH)
    assert happened == 2 * ["enter", "embedding", "attn", "attn", "head", "leave"]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_a_forward_runs_in_is_there_wherever_a_segment_runs(recompute: str) -> None:
    """In the forward once around all of them; alone, and again in the backward, around each."""
    depth, seen = [0], list[tuple[str, int]]()

    class Within(StackedLayers):
        @contextmanager
        def forward_pass(self) -> Iterator[None]:
            depth[0] += 1
            try:
                yield
            finally:
                depth[0] -= 1

        def norm(self, kind: Any, size: int, eps: float = 1e-5) -> Any:
            layer = self.base.norm(kind, size, eps)
            layer.register_forward_hook(lambda *_: seen.append(("norm", depth[0])))
            return layer

    context = single_process_context(OPTIONS, train={"recompute": recompute}, dtype=torch.float32)
    chunk = Gpt(context, OPTIONS).build_chunk(0, (Place(0, 0, range(2)),), Within(DenseLayers(context)), {})
    prepare(context, [chunk])
    total, _ = chunk(None, MICROBATCH).losses["lm"]
    total.backward()
    attend = next(segment for segment in chunk.segments() if segment.name == "attn")
    attend.fn(torch.ones(16, 2, OPTIONS.hidden_size))
    again = 4 if recompute == "full" else 0
    assert seen == [("norm", 1)] * (5 + again + 1)
    assert depth == [0]


def test_segments_are_made_once() -> None:
    chunk = built()[0].chunks[0]
    assert [id(segment) for segment in chunk.segments()] == [id(segment) for segment in chunk.segments()]


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ("none", ()),
        ("full", ("attn", "mlp")),
        (("mlp",), ("mlp",)),
        (("embedding", "attn"), ("embedding", "attn")),
        (("head", "loss"), ("head", "loss")),
        (("core_attn",), ()),
    ],
)
def test_what_is_named_runs_again_in_the_backward(recompute: Any, again: tuple[str, ...]) -> None:
    model, runs = built(recompute=recompute)
    model.step(MICROBATCH)
    once = {"embedding": 1, "attn": 2, "mlp": 2, "head": 1, "loss": 1}
    assert runs == {name: count * (1 + (name in again)) for name, count in once.items()}


def test_evaluation_recomputes_nothing() -> None:
    model, runs = built(recompute="full")
    total, _ = model.forward(replace(MICROBATCH, train=False))[0].losses["lm"]
    torch.autograd.backward(total)
    assert runs["attn"] == 2


@pytest.mark.parametrize("recomputed", ["full", ("attn",), ("mlp", "embedding"), ("core_attn",), ("core_attn", "mlp")])
def test_recomputed_dropout_is_the_dropout_of_the_forward(recomputed: Any) -> None:
    """The second microbatch moves the random stream between a forward and its backward."""
    gradients = []
    for recompute in ("none", recomputed):
        model, _ = built(recompute=recompute)
        first, _ = model.forward(MICROBATCH)[0].losses["lm"]
        model.forward(replace(MICROBATCH, index=1, sample0=2))
        torch.autograd.backward(first)
        gradients.append(logical_gradients(model.infos))
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_dropout_differs_between_samples_and_steps_and_repeats_in_place() -> None:
    model, _ = built()
    places = [MICROBATCH, MICROBATCH, replace(MICROBATCH, sample0=2), replace(MICROBATCH, step=2)]
    losses = [model.forward(place)[0].losses["lm"][0].item() for place in places]
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


def test_a_longer_sequence_than_the_model_knows_is_refused() -> None:
    with pytest.raises(InputError, match=r"a sequence of 17 tokens is longer than the model's 16; raise train\."):
        built()[0].forward(example_microbatch(61, length=17))


def test_a_shorter_sequence_runs() -> None:
    short = example_microbatch(61, length=5)
    out, _ = built()[0].forward(replace(short, fields={"tokens": short.fields["tokens"]}))
    assert out.logits is not None
    assert out.logits.shape == (5, 2, 128)
