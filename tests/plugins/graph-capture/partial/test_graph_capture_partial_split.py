"""A split backward: captured weight gradients come at I, and differ from eager ones by the order of additions alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_run.contracts import Action, ScheduleSpec
from megatron_run_engine.builtin.model.gpt import GptOptions
from megatron_run_engine.runtime.gradients import GradientAccumulator
from megatron_run_schedule_zero_bubble.v import ZeroBubbleV
from tests.plugins.graph_bench import Pipeline

#: Of two chunks on one stage, which both add to the gradient of the tied embedding.
TIED = GptOptions(num_layers=2, hidden_size=16, num_heads=2, vocab_size=32, dropout=0.1, tie_embeddings=True)
SCOPE = ("embedding", "attn", "mlp", "head", "loss")


class FirstChunkFirst(ZeroBubbleV):
    """ZB-V, but the W of the last microbatch come by chunk, where its I came the other way."""

    def actions(self, spec: ScheduleSpec) -> list[list[Action]]:
        (*before, i1, w1, i0, w0), *others = super().actions(spec)
        return [[*before, i1, i0, w0, w1], *others]


def pipelines(model: GptOptions) -> tuple[Pipeline, Pipeline]:
    """Two equal ones, of which the second has captured after a step."""
    eager, captured = (Pipeline(FirstChunkFirst(), 3, stages=1, chunks=2, model=model, scope=SCOPE) for _ in range(2))
    assert eager.step(1).equals(captured.step(1))
    captured.start_capture()
    return eager, captured


def test_a_tied_embedding_is_added_up_in_another_order() -> None:
    """Or there would be nothing to except from being equal bit for bit."""
    eager, captured = pipelines(TIED)
    assert not eager.step(2).equals(captured.step(2))


def test_the_bits_are_those_of_eager_weight_gradients_at_i(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def at_once(ledger: GradientAccumulator, key: tuple[int, int]) -> Iterator[None]:
        yield

    monkeypatch.setattr(GradientAccumulator, "deferring", at_once)
    eager, captured = pipelines(TIED)
    for number in (2, 3):
        assert eager.step(number).equals(captured.step(number))


def test_without_a_tie_they_are_equal_wherever_weight_gradients_come() -> None:
    eager, captured = pipelines(TIED.model_copy(update={"tie_embeddings": False}))
    for number in (2, 3):
        assert eager.step(number).equals(captured.step(number))
