"""Parameters that are frozen once the model is built: captured regions leave them alone, as eager ones do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.nn import Parameter

from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run.contracts import Schedule
from megatron_run_engine.builtin.model.gpt import GptOptions
from megatron_run_engine.runtime.gradients import main_grad
from megatron_run_schedule_1f1b import OneForwardOneBackward
from megatron_run_schedule_zero_bubble.h1 import ZeroBubbleH1
from tests.plugins.graph_bench import Pipeline
from tests.support.changed_options import changed

MODEL = GptOptions(num_layers=4, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.1, tie_embeddings=False)
EXPERTS = changed(MODEL, {"experts.count": 4, "experts.top_k": 2})
WHOLE = ("embedding", "attn", "mlp", "head", "loss")
#: What is frozen -> words of the names of its parameters.
FROZEN = {
    "the embedding": ("embedding",),
    "the embedding and the first layer": ("embedding", "layers.0."),
    "a layer between": ("layers.1.",),
    "norms": ("norm",),
    "all but the head": ("embedding", "layers."),
}
#: Schedule, its stages, and whether regions read their inputs where the one before left them.
RUNS: dict[str, tuple[Schedule, int, bool]] = {
    "sequential": (Sequential(), 1, True),
    "1f1b": (OneForwardOneBackward(), 2, False),
    "zero-bubble": (ZeroBubbleH1(), 2, True),
}
#: By day each name once, and each run: of two stages one had no backward to run for the last name.
DAILY = {
    "sequential": ("all but the head",),
    "1f1b": ("the embedding", "norms"),
    "zero-bubble": ("the embedding and the first layer", "a layer between"),
}
CASES = [
    pytest.param(run, name, id=f"{run}-{name}", marks=[pytest.mark.nightly] * (name not in DAILY[run]))
    for run in RUNS
    for name in FROZEN
    if run == "sequential" or name != "all but the head"
]


def pair(schedule: Schedule, stages: int, model: GptOptions, name: str, **options: Any) -> list[Pipeline]:
    """Two equal pipelines, frozen alike: one to run eagerly, one to capture."""
    made = [Pipeline(schedule, 2, stages=stages, model=model, **options) for _ in range(2)]
    for pipeline in made:
        frozen = [p for each, p in named_parameters(pipeline) if any(word in each for word in FROZEN[name])]
        assert frozen
        for parameter in frozen:
            parameter.requires_grad_(False)
    return made


def named_parameters(pipeline: Pipeline) -> Iterator[tuple[str, Parameter]]:
    for stage in pipeline.stages:
        for chunk in stage.chunks:
            for module_name, module in chunk.named_modules():
                yield from ((f"{module_name}.{name}", p) for name, p in module.named_parameters(recurse=False))


@pytest.mark.parametrize(("run", "name"), CASES)
def test_the_rest_trains_as_without_capture(run: str, name: str) -> None:
    schedule, stages, chain = RUNS[run]
    eager, captured = pair(schedule, stages, MODEL, name, scope=WHOLE, chain=chain)
    assert eager.step(1).equals(captured.step(1))
    captured.start_capture()
    assert eager.step(2).equals(captured.step(2))
    for stage in captured.stages:
        assert all(bool(main_grad(p).any()) == p.requires_grad for p in stage.parameters)


def test_a_region_without_anything_to_train_has_no_backward() -> None:
    eager, captured = pair(Sequential(), 1, EXPERTS, "the embedding", scope=("embedding", "attn"))
    assert eager.step(1).equals(captured.step(1))
    (size,) = captured.start_capture()
    assert size.graphs == 1 + 2 * MODEL.num_layers  # the embedding's forward, and both of a layer
    assert eager.step(2).equals(captured.step(2))


def test_what_is_frozen_or_trained_again_after_the_capture_does_not_fit() -> None:
    _, captured = pair(Sequential(), 1, MODEL, "a layer between", scope=WHOLE)
    captured.step(1)
    captured.start_capture()
    (stage,) = captured.stages
    assert not stage.capture.mismatch(captured.actions())
    idle = [parameter for parameter in stage.parameters if not parameter.requires_grad]
    idle[0].requires_grad_()
    assert stage.capture.mismatch(captured.actions()) == "1 parameters were frozen, or are trained again"
