"""The executor in C++ where it can be built, and Python in its place where it cannot."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatron_run.builtin.schedule.sequential import Sequential
from megatron_run_graph_capture_partial import native
from megatron_run_graph_capture_partial.executors import find_executor, in_python, out_form
from tests.support.graph_bench import Pipeline


@pytest.mark.slow  # a minute where it was never built; then it is kept
def test_the_native_executor_leaves_the_bits_of_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        native.build()
    except Exception as cause:  # noqa: BLE001 RUF100  # whatever a machine lacks
        pytest.skip(f"no compiler: {cause}")
    scope = ("embedding", "attn", "mlp", "head", "loss")
    eager, captured = (Pipeline(Sequential(), 2, scope=scope, executor="native") for _ in range(2))
    eager.step(1), captured.step(1)
    captured.start_capture()
    for number in (2, 3):
        assert eager.step(number).equals(captured.step(number))


def test_without_a_compiler_python_replays_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Any:
        raise RuntimeError("Error building extension\nand much more")

    monkeypatch.setattr(native, "_module", fail)
    with caplog.at_level(logging.WARNING):
        assert find_executor("native", logging.getLogger("megatron_run")) is in_python
    assert caplog.messages == ["the native executor of tapes cannot be built, Python replays: Error building extension"]


def test_operations_write_to_their_places_where_there_is_such_a_form() -> None:
    aten = torch.ops.aten
    assert out_form(aten.mm.default) == (aten.mm.out, ("out",))
    assert out_form(aten.native_layer_norm.default) == (aten.native_layer_norm.out, ("out0", "out1", "out2"))
    assert out_form(aten.detach.default) is None
